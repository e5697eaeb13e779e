"""What explains an error in a configuration: the keys of a model, the lines of a TOML file, and the message that names both."""
