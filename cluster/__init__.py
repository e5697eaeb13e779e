"""Roles, workers and their supervision on one machine. Processes are started by command; none of our roles is imported."""
