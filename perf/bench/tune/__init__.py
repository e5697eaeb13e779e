"""Benchmarks of the tuner."""
