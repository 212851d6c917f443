"""What NATS does not let this user do, as errors and as one line in the log for each subject.

The server reports a refused publish or subscribe by a line of its own, and answers nothing else: without this module
the caller would learn of it by a time-out. Always true: each refused subject is logged once, and at most
`SUBJECTS_KEPT_MAX` are remembered.
"""

import logging
import re
from typing import Final

from tensorhub_common.bus.errors import NotPermitted

SUBJECTS_KEPT_MAX: Final = 256

# nats-py hands the line on in lower case.
_VIOLATION: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.ASCII)
_CHANCE: Final = re.compile(r"[0-9a-f]{24}", re.ASCII)

_log: Final = logging.getLogger(__name__)


class PermissionErrors:
    """What was refused on one connection, and its predecessors."""

    def __init__(self, name: str) -> None:
        """Begin with nothing; `name` is what the process calls its connection."""
        self._name = name
        self._told: dict[tuple[str, str], NotPermitted] = {}

    def take(self, text: str) -> tuple[str | None, NotPermitted] | None:
        """Read what the server said: the subject, where it is about publishing, and the error; or None."""
        found = _VIOLATION.search(text.lower())
        if found is None:
            return None
        what, subject = found[1], found[2]
        # A consumer's name is another one each time, and the refusal is the same.
        known = self._told.get((what, _CHANCE.sub("*", subject)))
        if known is None:
            verb = "publish on" if what == "publish" else "subscribe to"
            known = NotPermitted(
                f"NATS does not permit {self._name} to {verb} {subject}: its credentials are another role's, another "
                "agent's or another job's. Give it its own (`tensorhub credentials`; docs/operate/security.md has the "
                "table)"
            )
            if len(self._told) < SUBJECTS_KEPT_MAX:
                self._told[what, _CHANCE.sub("*", subject)] = known
                _log.error("%s", known)
        return subject if what == "publish" else None, known

    def of_subscription(self, subject: str) -> NotPermitted | None:
        """Return why there is no such subscription, if it was refused."""
        return self._told.get(("subscription", _CHANCE.sub("*", subject.lower())))
