"""What nats-server is told of a hub's users: public keys and allow lists, in its own configuration's form. Pure."""

import json
from collections.abc import Iterable, Mapping

from tensorhub_common.auth.permissions import User, inbox_of, permissions_of


def users_conf(users: Mapping[User, str]) -> str:
    """Return the file for these users, by their public keys; it holds no secret."""
    entries = "\n".join(_entry(user, key) for user, key in sorted(users.items(), key=_order))
    return f"""\
# Written by TensorHub; changes are lost. Public keys and what each may do: docs/security.md says why.
authorization {{
  users: [
{entries}
  ]
}}
"""


def _order(entry: tuple[User, str]) -> tuple[str, str]:
    return (entry[0].role, entry[0].name or "")


def _entry(user: User, key: str) -> str:
    permissions = permissions_of(user, inbox_of(key))
    return f"""\
    # {user}
    {{ nkey: {key}, permissions: {{
      publish: {{ allow: {_listed(permissions.publish)} }}
      subscribe: {{ allow: {_listed(permissions.subscribe)} }}
    }} }}"""


def _listed(subjects: Iterable[str]) -> str:
    # NATS's configuration takes JSON's strings.
    return json.dumps(list(subjects))
