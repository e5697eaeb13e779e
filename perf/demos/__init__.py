"""The demos of many runs, of a sweep, and of the cluster controller. They also measure, and their exit code is a verdict."""
