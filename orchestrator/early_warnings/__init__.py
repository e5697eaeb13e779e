"""Says early that a run goes wrong, by its metrics so far: rules, and the watch that applies them to each step."""
