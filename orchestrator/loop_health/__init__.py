"""What keeps the event loop prompt, and what says which code made it late."""
