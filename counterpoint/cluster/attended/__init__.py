"""Jobs whose master is the process that shows them."""
