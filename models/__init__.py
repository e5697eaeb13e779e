"""Tiny models, built offline, and the way from a model's name to its directory."""
