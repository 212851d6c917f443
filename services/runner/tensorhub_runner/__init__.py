"""The runner beside an engine: it drives it, follows versions and streams tokens (docs/design/rollouts)."""
