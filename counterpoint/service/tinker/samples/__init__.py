"""Samples of clients: their samplers, and the requests to these."""
