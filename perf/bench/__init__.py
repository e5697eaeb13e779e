"""Benchmarks, a module a case of the table in `perf/README.md`: each has `measure(quick) -> list[Case]` and runs by itself."""
