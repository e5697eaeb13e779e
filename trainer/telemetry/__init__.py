"""What the trainer publishes of itself: spans of its steps, exported tokens, which runs it has, and its endpoint for Prometheus."""
