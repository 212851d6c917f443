"""`python -m tensorhub_launcher.become MODULE ARGUMENT…` runs a module with an ear for Ctrl-C from the beginning.

A command that becomes another program blocks SIGINT before and this one unblocks it: between the two no
instruction is without a handler.
"""

import sys

from tensorhub_launcher import have_standard_files, listen

if __name__ == "__main__":
    listen()
    have_standard_files()
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
