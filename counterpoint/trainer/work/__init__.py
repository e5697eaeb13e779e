"""What is asked of a run: its items, the contributions to its gradients, and where they come from."""
