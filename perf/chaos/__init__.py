"""The parts of `perf/bench/chaos.py`: a real job, its victims, a witness that reads along, and an audit of the disk."""
