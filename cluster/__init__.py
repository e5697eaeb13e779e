"""Floor 1: roles, workers and their lifecycle on one machine. It starts processes by command and knows none of them."""
