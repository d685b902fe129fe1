"""MCP servers behind the gateway: how to reach one, what it says it can do, and how to keep it from hurting others."""
