"""What roles did and do: spans of steps, decisions about groups, servers and slots, profiles, what a machine gives."""
