"""Receipts of committed steps: a chain of hashes that `counterpoint verify` checks."""
