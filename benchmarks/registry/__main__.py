"""`python -m benchmarks.registry`."""

from benchmarks.registry.run import main

main()
