"""Trials that are runs of a live job: their configurations, their processes, and the job that they join."""
