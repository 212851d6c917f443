"""The bus: everything that the hub sends and receives over NATS. Thin I/O, no decisions."""
