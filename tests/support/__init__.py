"""What tests of several packages need: polling, ports, records, and servers and trainers for fault injection."""
