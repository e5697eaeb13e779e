"""The process of a worker of a class: calls its hooks in order, and tells its keeper."""
