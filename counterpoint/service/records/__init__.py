"""The service's records: one database of clients and their use, and the files of a former version."""
