"""Hostile requests to the gateway: `hostile_requests.py` makes them, `raw_client.py` sends them; `python -m perf.fuzz`."""
