"""A job that runs for as long as is asked for, and what each of its processes holds meanwhile."""
