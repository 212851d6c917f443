"""Drivers of the production cores in virtual time: agent, registry, planner, worker. `faultsim.world` imports it."""
