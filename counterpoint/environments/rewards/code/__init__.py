"""The kind `code`: a program that the model wrote is run against the tests of its example."""
