"""A run's work: its items, the contributions to its gradients, and their sources."""
