"""What every process here does about the system: stop requests, permanent errors, the GIL."""
