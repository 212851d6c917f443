"""How `tensorhub trace` draws a transfer: spans as a tree, and as a waterfall. `cli.commands.trace` imports it."""
