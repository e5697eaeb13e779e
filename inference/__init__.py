"""Floor 1: vLLM from both sides: the pool of servers a client sees, and the plugin that runs inside each server."""
