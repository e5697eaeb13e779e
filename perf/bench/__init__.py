"""Benchmarks, a module a case of the table in `perf/README.md`: each has `measure(size) -> list[Case]` and runs by itself."""
