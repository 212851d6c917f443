"""Faults of the modelled world, a file for each family. `faultsim.world` imports it."""
