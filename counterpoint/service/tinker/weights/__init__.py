"""Saved weights: their names, their time, and their ways out and in."""
