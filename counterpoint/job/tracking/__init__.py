"""Metrics of a job sent to other systems, by a process of its own that follows the files which the roles write."""
