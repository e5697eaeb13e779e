"""Checks one environment alone, before a run trains on it: plays it against a real server, and says what training would meet."""
