"""Floor 4: one entry point, `counterpoint`. It wires and decides nothing; everything heavy is imported late."""
