"""Permissions on NATS: the users of a hub, their keys, and their part of the server's configuration."""
