"""Environments in the verifiers library's own API, as its users write them. They need no network."""
