"""What the processes of a hub have in common: messages, subjects, the catalog, the bus, settings, telemetry."""
