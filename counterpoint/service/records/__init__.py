"""What the service keeps: one database of records and of what was used, and what a former version kept in files."""
