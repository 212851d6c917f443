"""What goes wrong in a world: `all_faults` lists the faults, and the world imports it."""
