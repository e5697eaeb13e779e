"""DataChannel: a named, bounded queue between the roles of a job, with leases, redelivery and an end of stream."""
