"""Reading `rollouts.jsonl` and what lies beside it: an index of its lines, search, one rollout, single tokens."""
