"""What the trainer computes around the loss: the passes of a step, the reference policy, and the value head."""
