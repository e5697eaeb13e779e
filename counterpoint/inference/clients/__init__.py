"""The clients of one vLLM server: its HTTP, its answers, its failures, its load."""
