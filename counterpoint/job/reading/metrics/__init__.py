"""The steps of runs, from `metrics.jsonl` and `evaluations.jsonl`: whole lines, their newest, and columns of numbers."""
