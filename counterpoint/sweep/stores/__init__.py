"""Stores with compare-and-swap, a module a backend. The interface is `counterpoint/sweep/store.py`'s."""
