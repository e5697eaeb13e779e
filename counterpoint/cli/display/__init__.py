"""How commands show their results: the console, progress, tables and pictures."""
