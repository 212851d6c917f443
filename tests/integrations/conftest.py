"""Tests with engines, trainers and cluster managers of others: each needs an environment of its own.

`make integrations NAMES=trl` makes that of one of them, from `trl.txt` beside this file, and runs its folder there.
Where a package is not installed, its folder is not collected.
"""

from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent

collect_ignore = [each.stem for each in HERE.glob("*.txt") if find_spec(each.stem) is None]
