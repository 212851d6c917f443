"""What must hold after every step, at the end of a call, and at rest. `faultsim.world` imports it."""
