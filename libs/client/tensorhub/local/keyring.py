"""The keys of all users of one hub, in a folder, and the server's file about them.

    admin.nk  registry.nk  planner.nk      one each
    rollout.nk                             the rollout manager's
    client.nk                              clients of every job
    agents/<agent>.nk                      each agent's
    runners/<runner>.nk                    each runner's
    jobs/<job>.nk                          clients of that job alone
    nats-users.conf                        public keys and what each may do, for nats-server to include

For a hub on several hosts, make the keyring on one of them and give each host its own files. Always true: folders are
their owner's alone (0700), key files too (0600); a key that is there is kept, until somebody asks for a new one.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tensorhub_common.auth.keys import SUFFIX, KeyUnusable, make_key, public_key_of, read_seed
from tensorhub_common.auth.permissions import Role, User, users_conf

FOLDER_MODE: Final = 0o700
CONF_MODE: Final = 0o600
CONF: Final = "nats-users.conf"
KEYS_MAX: Final = 10_000
"""A folder with more keys than this is none of ours."""

OF_EVERY_HUB: Final = (
    User(Role.ADMIN),
    User(Role.REGISTRY),
    User(Role.PLANNER),
    User(Role.ROLLOUT),
    User(Role.CLIENT),
)

_FOLDERS: Final = {"agents": Role.AGENT, "runners": Role.RUNNER, "jobs": Role.CLIENT}


class Keyring:
    """One folder of keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def conf(self) -> Path:
        """What nats-server includes."""
        return self.folder / CONF

    def path_of(self, user: User) -> Path:
        """Return the file of a user's key, which may not exist yet."""
        if user.name is None:
            return self.folder / f"{user.role}{SUFFIX}"
        folder = next(folder for folder, role in _FOLDERS.items() if role is user.role)
        return self.folder / folder / f"{user.name}{SUFFIX}"

    def make(self, users: Iterable[User], renewed: Iterable[User] = ()) -> None:
        """Make the keys that are missing, replace those of `renewed`, and write the server's file about all of them."""
        try:
            for folder in (self.folder, *(self.folder / each for each in _FOLDERS)):
                folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            for user in renewed:
                self.path_of(user).unlink(missing_ok=True)
            for user in users:
                path = self.path_of(user)
                if not path.exists():
                    make_key(path)
            self._write_conf()
        except OSError as why:
            raise KeyUnusable(f"keys can't be kept in {self.folder}: {why}") from None

    def users(self) -> dict[User, str]:
        """Return the public key of each user that has one here."""
        found: dict[User, str] = {}
        for path, user in self._files():
            found[user] = public_key_of(read_seed(path), path)
        return found

    def _files(self) -> list[tuple[Path, User]]:
        found = [(path, user) for user in OF_EVERY_HUB if (path := self.path_of(user)).exists()]
        for folder, role in _FOLDERS.items():
            paths = sorted((self.folder / folder).glob(f"*{SUFFIX}"))
            found += [(path, User(role, path.name.removesuffix(SUFFIX))) for path in paths]
        if len(found) > KEYS_MAX:
            raise KeyUnusable(f"{self.folder} holds {len(found)} keys, and a hub has at most {KEYS_MAX}")
        return found

    def _write_conf(self) -> None:
        text = users_conf(self.users())
        draft = self.conf.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, CONF_MODE), "w") as file:
            file.write(text)
        draft.replace(self.conf)
