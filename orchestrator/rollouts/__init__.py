"""Rollouts: playing one, merging its turns into samples, and the files of rollouts."""
