"""`ringfence init`: a first configuration, from nothing or from what an MCP client has already."""
