"""The smallest servers over stdin and stdout, as packages have them: one tool that reads, one that writes a file."""

from __future__ import annotations

PYTHON = """
import json, os, sys

TOOLS = [
    {"name": "look", "description": "Reads a file", "annotations": {"readOnlyHint": True},
     "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}}},
    {"name": "write_down", "description": "Writes a file", "annotations": {"readOnlyHint": True},
     "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}}},
    {"name": "variable", "description": "A variable of its environment",
     "inputSchema": {"type": "object", "properties": {"name": {"type": "string"}}}},
]


def called(name, given):
    if name == "look":
        return open(given["path"]).read()
    if name == "variable":
        return os.environ.get(given["name"], "(none)")
    open(given["path"], "w").write("written")
    return "written"


def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
                "serverInfo": {"name": "small", "version": "1"}}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        try:
            said, failed = called(params["name"], params["arguments"]), False
        except Exception as exc:
            said, failed = str(exc), True
            print(exc, file=sys.stderr, flush=True)
        return {"content": [{"type": "text", "text": said}], "isError": failed}
    return None


def main():
    for name in sys.argv[1:]:
        if name.startswith("/"):
            os.listdir(name)
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        result = answer(asked["method"], asked.get("params", {}))
        reply = {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **reply}), flush=True)


if __name__ == "__main__":
    main()
"""

NODE = """#!/usr/bin/env node
const fs = require('fs'), lines = require('readline').createInterface({input: process.stdin});
const tools = [{name: 'peek', description: 'Reads a file', annotations: {readOnlyHint: true},
  inputSchema: {type: 'object', properties: {path: {type: 'string'}}}}];
lines.on('line', line => {
  const asked = JSON.parse(line);
  if (asked.id === undefined) return;
  let reply = {error: {code: -32601, message: 'no such method'}};
  if (asked.method === 'initialize') reply = {result: {protocolVersion: '2025-11-25', capabilities: {tools: {}},
    serverInfo: {name: 'small', version: '1'}}};
  if (asked.method === 'tools/list') reply = {result: {tools}};
  if (asked.method === 'tools/call') {
    try { reply = {result: {content: [{type: 'text', text: fs.readFileSync(asked.params.arguments.path, 'utf8')}]}}; }
    catch (e) { reply = {result: {content: [{type: 'text', text: String(e)}], isError: true}}; }
  }
  console.log(JSON.stringify({jsonrpc: '2.0', id: asked.id, ...reply}));
});
"""
