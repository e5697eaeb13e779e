"""Commands about the receipts of a run."""
