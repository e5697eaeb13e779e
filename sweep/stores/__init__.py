"""Stores with compare-and-swap, a module a backend. The interface is `sweep/store.py`'s."""
