"""The peers: each a program of its own that brings the arena's source into its destinations in its own way."""
