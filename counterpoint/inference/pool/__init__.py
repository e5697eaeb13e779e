"""The pool: many vLLM servers as one."""
