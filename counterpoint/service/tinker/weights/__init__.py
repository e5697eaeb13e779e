"""Saved weights: their names, how long they are kept, and how they leave and come."""
