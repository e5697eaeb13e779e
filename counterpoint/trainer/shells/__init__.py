"""Two shells over the trainer's one loop: what follows the items of a run of steps, and those that are asked for."""
