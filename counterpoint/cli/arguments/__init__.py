"""How command lines are parsed: files, switches, flags and help."""
