"""One short cut of the links between two namespaces; `make partition` cuts longer and with several seeds."""

import subprocess
import sys

import pytest
from tests.partition.namespaces import why_not

SEED = 1
CUT_S = 2
RUN_S = 150


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 30)
def test_cut_and_healed() -> None:
    """No wrong byte, no late answer, and all go on afterwards: see partition.py."""
    if reason := why_not():
        pytest.skip(reason)
    # A process of its own: it moves into a namespace, for good.
    program = [sys.executable, "-m", "tests.partition.partition"]
    options = ["--seeds", "1", "--seed", str(SEED), "--seconds", str(CUT_S)]
    ended = subprocess.run([*program, *options], capture_output=True, text=True, timeout=RUN_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no finding" in ended.stdout
