"""The commands for jobs of roles (`cluster`): each is a client of the job's master, found by the job's directory."""
