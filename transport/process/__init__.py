"""What every process here does about the system: stop requests, parents that die, permanent errors, the GIL."""
