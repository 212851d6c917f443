"""The simulator: the production cores under a modelled log, clock, network and crash."""
