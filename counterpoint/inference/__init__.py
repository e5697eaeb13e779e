"""vLLM from both sides: the pool of servers that an orchestrator uses, and the plugin that runs inside each server."""
