"""Everything that crosses a process boundary, as frozen msgspec structs."""
