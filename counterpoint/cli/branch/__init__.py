"""Commands that go on from a step of a run."""
