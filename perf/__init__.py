"""Benchmarks, chaos and demos. Each is a command, and compares what it measures within one run."""
