"""Rollouts: how one is played, how its turns become samples, and how rollouts are written to files."""
