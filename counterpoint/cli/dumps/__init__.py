"""The commands that make, replay and measure dumps of steps."""
