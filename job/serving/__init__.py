"""`counterpoint serve` as a worker of a job; the server itself is the package `serve`."""
