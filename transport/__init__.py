"""The records that travel between processes, their encoding, and the wires they travel on."""
