"""Floor 1: what a task is: examples, rollouts over turns, and scores. Built-in tasks and the protocol for one's own."""
