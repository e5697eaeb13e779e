"""Environments of the verifiers library (extra `verifiers`), played with the policy as their model."""
