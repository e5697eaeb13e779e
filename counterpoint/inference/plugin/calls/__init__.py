"""Ways of model calls past layers of the API server that they do not need."""
