"""Helpers for the tests of several packages: waiting, ports, example records, fake servers and trainers."""
