"""When a trial, or the whole experiment, has gone on for long enough."""
