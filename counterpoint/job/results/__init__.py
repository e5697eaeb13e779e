"""What a notebook reads of jobs: the steps as they are trained, and in which values runs differ."""
