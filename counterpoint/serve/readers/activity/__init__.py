"""What roles did and do: spans of steps, fates of groups."""
