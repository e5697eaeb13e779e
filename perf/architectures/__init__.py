"""Which architectures of the installed transformers can be trained, and whether they are trained right."""
