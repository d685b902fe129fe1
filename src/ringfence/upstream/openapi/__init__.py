"""HTTP APIs as servers: an OpenAPI document becomes tools, and a call of one becomes one HTTP request."""
