"""What processes say about themselves while they run: spans, and metrics for Prometheus."""
