"""How `tensorhub replay` scores responses again, and shows what came of it. `cli.commands.replay` imports it."""
