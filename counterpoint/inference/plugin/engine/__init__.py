"""What runs in the process of vLLM's engine, beside its workers."""
