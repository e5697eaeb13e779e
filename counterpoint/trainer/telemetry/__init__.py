"""What the trainer publishes of itself: spans of its steps, exported tokens, its runs, and its endpoint for Prometheus."""
