"""How a registry or a planner runs as a process: settings, signals, telemetry, systemd.

The `main` of a service imports it.
"""
