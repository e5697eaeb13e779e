"""How a configuration is loaded: TOML, environment variables and flags, with errors that quote the file."""
