"""How commands show what goes on: the console, progress, tables and pictures."""
