"""The step boundary: from finished groups to a committed batch at the trainer."""
