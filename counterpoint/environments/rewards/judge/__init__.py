"""The kind `judge`: a language model behind an OpenAI-compatible server scores completions."""
