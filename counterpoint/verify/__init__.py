"""Checks a run's directory against its receipts, by the documented formats alone (`docs/receipts.md`).

It imports nothing of the product, so that a fault there cannot hide itself, and trusts nothing that lies in the directory: sizes
are bounded, no link is followed, nothing is unpickled. `counterpoint/verify/run.py`:`verify` is the entry.
"""
