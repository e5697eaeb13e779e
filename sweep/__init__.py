"""Apart: targets raced over by workers without a coordinator; exactly one wins each. Needs storage and nothing else."""
