"""What watches an experiment: user callbacks, and the loggers that write each trial's files."""
