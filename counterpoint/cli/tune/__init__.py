"""`counterpoint tune` and its `status` and `resume`."""
