"""The agent: owns the memory that weights live in, serves reads and carries out plans."""
