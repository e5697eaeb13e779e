"""Measures everything that a GPU is needed for in one command: see `perf.gpu.__main__`."""
