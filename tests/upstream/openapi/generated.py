"""An OpenAPI document of many operations: recursive, polymorphic, paginated, with every kind of parameter and body."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def schema(number: int) -> Json:
    """One of many named schemas that refer to each other in circles."""
    other = f"#/components/schemas/Thing{(number + 1) % 60}"
    return {
        "type": "object",
        "required": ["id", "name"],
        "properties": {
            "id": {"type": "string", "readOnly": True},
            "name": {"type": "string", "maxLength": 50, "nullable": number % 2 == 0},
            "children": {"type": "array", "items": {"$ref": f"#/components/schemas/Thing{number}"}},
            "next": {"$ref": other},
            "shape": {
                "oneOf": [{"$ref": "#/components/schemas/Circle"}, {"$ref": "#/components/schemas/Square"}],
                "discriminator": {"propertyName": "kind"},
            },
        },
    }


def resource(number: int) -> Json:
    name = f"things{number}"
    thing = {"$ref": f"#/components/schemas/Thing{number % 60}"}
    answers = {"200": {"description": "ok", "content": {"application/json": {"schema": thing}}}}
    page = [
        {"name": "cursor", "in": "query", "schema": {"type": "string"}},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
        {"name": "X-Team", "in": "header", "schema": {"type": "string"}},
    ]
    content = {"application/json": {"schema": thing}, "application/xml": {"schema": {"type": "string"}}}
    one = f"/{name}/{{id}}"
    return {
        f"/{name}": {
            "get": {
                "operationId": f"list_{name}",
                "summary": f"Lists {name}",
                "parameters": page,
                "responses": answers,
            },
            "post": {"operationId": f"create_{name}", "requestBody": {"required": True, "content": content}},
        },
        one: {
            "parameters": [{"$ref": "#/components/parameters/Id"}],
            "get": {"operationId": f"get_{name}", "responses": answers},
            "put": {"operationId": f"replace_{name}", "requestBody": {"content": content}},
            "delete": {"operationId": f"delete_{name}"},
        },
        f"{one}/file": {
            "parameters": [{"$ref": "#/components/parameters/Id"}],
            "put": {"requestBody": {"content": {"application/octet-stream": {}}}},
        },
    }


def document(resources: int = 100) -> Json:
    """Six operations for each resource."""
    paths: Json = {}
    for number in range(resources):
        paths |= resource(number)
    circle = {"type": "object", "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}}}
    square = {
        "type": "object",
        "properties": {"kind": {"const": "square"}, "inside": {"$ref": "#/components/schemas/Circle"}},
    }
    return {
        "openapi": "3.0.3",
        "info": {"title": "Things", "version": "1"},
        "servers": [{"url": "https://never.example.com/v9"}],
        "paths": paths,
        "components": {
            "schemas": {**{f"Thing{n}": schema(n) for n in range(60)}, "Circle": circle, "Square": square},
            "parameters": {"Id": {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}},
        },
    }
