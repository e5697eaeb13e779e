"""Changes that are tried inside a run: two branches of one of its steps, and the test that decides between them."""
