"""One vLLM server, as a client speaks to it: its HTTP, its answers, its failures, its load."""
