"""Samples of clients: the samplers that they make, and what is asked of these."""
