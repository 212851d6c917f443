"""What of the messages and stored forms one release can't read of the other, in sentences."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = str(Path(__file__).with_name("fields.py"))
Forms = dict[str, dict[str, Any]]


def forms_of(python: str) -> Forms:
    """Return the messages and stored forms of a release, as `fields.py` names them."""
    done = subprocess.run([python, "-P", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise AssertionError(f"{python} can't name its messages: {done.stderr[-1000:]}")
    found: Forms = json.loads(done.stdout)
    return found


def differences(old: Forms, new: Forms) -> list[str]:
    """Say what the older release can't read of today's, and today's of the older one."""
    found = []
    for name, before in old.items():
        now = new.get(name)
        if now is None:
            if before["tag"] is not None or any(before["fields"].values()):
                found.append(f"{name} is gone: the older release still sends it and expects it")
            continue
        if (before["tag"], before["array"]) != (now["tag"], now["array"]):
            found.append(f"{name} has another tag or form: neither release reads it of the other")
        found += _missing(name, before, now)
    return found


def _missing(name: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    found = [
        f"{name}.{field} is gone: the older release does not read {name} without it"
        for field, required in before["fields"].items()
        if required and field not in now["fields"]
    ]
    found += [
        f"{name}.{field} has no default: this release does not read what the older one writes without it"
        for field, required in now["fields"].items()
        if required and field not in before["fields"]
    ]
    common = min(len(before["fields"]), len(now["fields"]))
    if now["array"] and list(before["fields"])[:common] != list(now["fields"])[:common]:
        found.append(f"{name} is an array, and its first fields are others: add fields at its end only")
    return found


if __name__ == "__main__":
    # python -m tests.mixed.differences OLD_PYTHON [NEW_PYTHON]
    told = differences(forms_of(sys.argv[1]), forms_of(sys.argv[2] if len(sys.argv) > 2 else sys.executable))
    print("\n".join(told) or "each release reads what the other writes")
    sys.exit(1 if told else 0)
