"""The `tensorhub` command."""
