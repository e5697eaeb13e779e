"""The chaos of a job of many roles: what is done to it, a witness, and an audit of what it saw."""
