"""MCP servers in boxes."""
