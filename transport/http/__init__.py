"""What every HTTP server of ours shares: the listening socket, its connections, and what a request's head must be."""
