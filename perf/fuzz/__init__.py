"""Hostile requests for `counterpoint bench gateway-fuzz`: `hostile_requests.py` makes them, `raw_client.py` sends them."""
