"""Dumps of a step, replayed through the daemon's own step boundary: replay, attribution, and making and importing dumps."""
