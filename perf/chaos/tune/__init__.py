"""An experiment that is killed, and the audit of what it left."""
