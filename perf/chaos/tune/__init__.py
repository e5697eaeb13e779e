"""The chaos of an experiment, and the audit of what it left."""
