"""The bus: everything that the hub says and hears over NATS. Thin I/O, no decisions."""
