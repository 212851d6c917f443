"""How a program's tensors are described, moved into hub memory, and kept there.

The one part of the SDK that imports torch. `aio` and the commands that read files import it, where they need it.
"""
