"""Reads the last version alone."""

import sys

from tests.integration.demo.scripted import WRONG, copy, end_when_told

if "rollout-3" not in sys.argv[-1]:
    copy("held", 10, [])
    end_when_told(10, [])
if WRONG == "dies":
    sys.exit("rollout-3: the reason")
copy("held", 9 if WRONG == "hangs" else 10, ["w"] if WRONG == "differs-held" else [])
end_when_told(9 if WRONG == "stale" else 10, ["w"] if WRONG == "differs-end" else [])
