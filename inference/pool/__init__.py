"""Many vLLM servers as one."""
