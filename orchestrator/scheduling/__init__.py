"""The scheduler, a pure state machine: its events, its instructions, its groups."""
