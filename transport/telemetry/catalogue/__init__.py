"""The names of all metrics, one file for each kind of process. `docs/metrics.md` is generated from these tables."""
