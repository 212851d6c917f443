"""All I/O that planning asks for: catalogs, layouts, programs, loads. `app` imports it."""
