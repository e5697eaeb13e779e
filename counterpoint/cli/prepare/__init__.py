"""Commands that prepare a job or your shell: a model, keys and the token, completion."""
