"""Commands that send what a job measures to other systems."""
