"""Rows of data for environments: JSONL, Parquet, `datasets` of the hub or a directory, or written into the configuration."""
