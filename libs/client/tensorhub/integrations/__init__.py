"""TensorHub in programs of others: one module, or one package, for each engine, trainer and cluster manager.

Each imports what it integrates with, and none imports another: a host installs what it uses (the extra of the same
name). All of them use the SDK as any other program does.
"""
