"""The demos of many runs and of a sweep. They also measure, and their exit code is a verdict."""
