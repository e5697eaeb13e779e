"""What `perf/bench/chaos.py` is made of: a real job, victims in it, a witness beside it, and an audit of what is left on disk."""
