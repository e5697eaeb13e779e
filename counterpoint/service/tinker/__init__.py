"""The protocol of the `tinker` SDK over driven runs and samplers (docs/tinker.md)."""
