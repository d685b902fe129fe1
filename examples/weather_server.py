"""An MCP server over stdio with one tool that reads and one that writes."""

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("weather")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def forecast(city: str) -> str:
    """Tomorrow's weather."""
    return f"{city}: sunny"


@server.tool()
def subscribe(city: str, mail: str) -> str:
    """Mail the forecast every morning."""
    return f"{mail} gets the weather of {city}"


if __name__ == "__main__":
    server.run("stdio")
