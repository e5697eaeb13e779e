"""Runs that are changed while they are trained: copies of one another, and keys that change in place."""
