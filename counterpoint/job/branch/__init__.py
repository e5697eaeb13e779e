"""Runs that go on from a step of another run."""
