"""Tools that a model calls: definitions, the loop of calls, MCP servers, and a sandbox for Python that a model wrote."""
