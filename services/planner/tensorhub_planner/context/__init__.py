"""All I/O that planning asks for: catalogs, layouts, programs, loads. `app` imports it.

Seams: `catalogs`, `layout_store`, `load_subscriber`, `prefetch`, `program_store`.
"""
