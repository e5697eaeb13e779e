"""What processes have in common: children and what they report, exit codes, stop requests, pacing of threads."""
