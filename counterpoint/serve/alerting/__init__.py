"""Alerts: a webhook is told of a job's problems and of its end, by a process of its own that reads the job's files."""
