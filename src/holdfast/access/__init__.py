"""Who may use the console, the HTTP API and the MCP server, and what each of them may do there."""
