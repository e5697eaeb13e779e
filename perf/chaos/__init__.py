"""Kills, stops and cuts off the processes of real jobs, and audits what is left: `python -m perf.chaos KIND`."""
