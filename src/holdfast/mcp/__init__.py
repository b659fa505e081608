"""The MCP server: the verbs of operators as tools for assistants. See `Tools` and `create_server`."""

from holdfast.installing import require_extra

require_extra("mcp", "mcp")

from holdfast.mcp.server import create_http, create_server, serve_stdio
from holdfast.mcp.tools import MOST_ROWS, Tools

__all__ = ["MOST_ROWS", "Tools", "create_http", "create_server", "serve_stdio"]
