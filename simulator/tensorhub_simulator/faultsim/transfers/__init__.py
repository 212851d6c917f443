"""Both ends of one read between two modelled agents. Nodes import it."""
