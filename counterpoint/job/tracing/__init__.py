"""Traces of a job sent to a collector of OpenTelemetry, by a process that follows the files of spans."""
