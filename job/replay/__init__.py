"""A dumped step, run again through the daemon's own step boundary: dumps, replay, attribution, and their pictures."""
