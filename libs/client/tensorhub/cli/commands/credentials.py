"""`tensorhub credentials`: the keys with which a hub's processes log in to NATS, and the server's file about them."""

from pathlib import Path
from typing import Annotated, Final

import typer

from tensorhub.cli.output import line
from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub_common.auth.keys import SUFFIX
from tensorhub_common.auth.permissions import Role, User

DEFAULT: Final = Path("credentials")


def credentials(
    folder: Annotated[Path, typer.Argument(help="Where the keys stand, or shall stand.")] = DEFAULT,
    agent: Annotated[list[str] | None, typer.Option(help="An agent's id. Repeat it for each.")] = None,
    runner: Annotated[list[str] | None, typer.Option(help="A runner's id. Repeat it for each.")] = None,
    job: Annotated[
        list[str] | None, typer.Option(help="A job that has clients of its own. Repeat it for each.")
    ] = None,
    renew: Annotated[
        list[str] | None, typer.Option(help="A key to replace, as `jobs/run-7`: the old one ends. Repeat it for each.")
    ] = None,
) -> None:
    """Make keys for NATS that are missing, one for each process and job; `nats-users.conf` is for the server."""
    keyring = Keyring(folder)
    agents = [User(Role.AGENT, each) for each in agent or ()]
    runners = [User(Role.RUNNER, each) for each in runner or ()]
    jobs = [User(Role.CLIENT, each) for each in job or ()]
    known = {str(keyring.path_of(user).relative_to(keyring.folder)): user for user in keyring.users()}
    renewed = [_known(known, each) for each in renew or ()]
    keyring.make([*OF_EVERY_HUB, *agents, *runners, *jobs, *renewed], renewed)
    for user, key in keyring.users().items():
        line(f"{keyring.path_of(user)}  {user}  {key}")
    line(f"for nats-server to include, and to read again (SIGHUP) after each change: {keyring.conf}")


def _known(known: dict[str, User], name: str) -> User:
    user = known.get(name.removesuffix(SUFFIX) + SUFFIX)
    if user is None:
        names = ", ".join(sorted(each.removesuffix(SUFFIX) for each in known))
        raise typer.BadParameter(f"there is no key {name!r} to renew; there are: {names}", param_hint="--renew")
    return user
