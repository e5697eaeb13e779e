"""The built-in kind `verifiers`."""
