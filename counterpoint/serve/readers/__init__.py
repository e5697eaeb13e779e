"""What the page makes of a job's facts (problems, what to do next), and the directories of experiments and of sweeps."""
