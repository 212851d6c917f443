"""What a check of `tensorhub doctor` has found."""

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line. `advice` says what to do, unless the level is "ok"."""

    check: str
    level: Level
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", found)


def warn(check: str, found: str, advice: str) -> Finding:
    """It works, and could be better."""
    return Finding(check, "warn", found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(check, "fail", found, advice)
