"""Environments before a run trains on them: a new one is written, and one is played alone against a real server."""
