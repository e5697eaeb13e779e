"""Losses: the contract of a loss, the built-in ones by name, and how an operator's own is loaded."""
