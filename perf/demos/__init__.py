"""The demos of many runs and of a sweep, which measure as much as they show."""
