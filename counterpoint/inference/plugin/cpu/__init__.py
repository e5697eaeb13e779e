"""What our plugin replaces in vLLM on a CPU, through the entry point `vllm.platform_plugins`; on a GPU nothing of it is used."""
