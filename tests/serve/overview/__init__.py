"""The overview, curves, loop and problems."""
