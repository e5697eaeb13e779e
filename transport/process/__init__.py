"""What processes have in common: stop requests, permanent errors, pacing of threads."""
