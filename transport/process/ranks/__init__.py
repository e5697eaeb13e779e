"""The ranks of one node as processes: torch's elastic agent, and whoever starts it."""
