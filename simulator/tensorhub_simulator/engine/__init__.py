"""What both simulators stand on: virtual time and processes. Every package of the simulator may import it."""
