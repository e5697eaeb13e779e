"""Backends: where workers run. `base` is the contract."""
