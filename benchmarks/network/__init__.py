"""How reads go over slow wires, which network namespaces of this machine stand for; needs root.

`python -m benchmarks.network.wan` (two sites), `.pipeline` (one to eight readers), `.calibrate` (runs that the
simulator is held against) and `.simulated` (what the simulator says, for docs/design/simulate.md).
"""
