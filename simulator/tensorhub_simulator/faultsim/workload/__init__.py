"""What the modelled users do. `faultsim.world` imports it."""
