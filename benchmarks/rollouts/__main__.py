"""`python -m benchmarks.rollouts`."""

from benchmarks.rollouts.run import main

main()
