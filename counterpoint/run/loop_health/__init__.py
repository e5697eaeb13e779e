"""Keeps the event loop responsive, and names the code that made it late."""
