"""Every argument of every command, given what it can't be: one line, exit code 2, and nothing was asked of any hub."""

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

import tensorhub
from tensorhub.cli.main import app
from tensorhub.cli.runner import CommandDeadline

COMMANDS: dict[str, Callable[..., None]] = {
    each.callback.__name__: each.callback for each in app.registered_commands if each.callback is not None
}
GOOD: dict[str, list[str]] = {
    "versions": ["policy"],
    "watch": ["policy"],
    "publish": ["policy", "weights.safetensors"],
    "pull": ["policy", "out.safetensors"],
    "retain": ["policy", "--last", "1"],
    "pin": ["policy", "1"],
    "unpin": ["policy", "1"],
    "rewind": ["policy", "--to", "1"],
    "quota": ["1GiB"],
    "drain": ["agent-0"],
}
"""What else each must be given."""

NO_NUMBERS = ("nan", "inf", "-inf", "-1", "1e400", "", "x", "9" * 25, "9" * 5000, "0x1", "\u0663\u0664\u0665x")
NO_NAMES = ("a.b", "_mine", "", "x" * 65, "a b", "\u00fc", "*", ">")
NAMES = ("job", "model", "replica", "agent")


def arguments_of(command: str) -> Iterator[tuple[str, type, Any]]:
    """Yield the name, the kind and what typer knows of each argument."""
    for name, hint in get_type_hints(COMMANDS[command], include_extras=True).items():
        if name != "return":
            annotated = _first(hint)
            assert get_origin(annotated) is Annotated, f"{command} does not say what {name} is"
            kind, info = get_args(annotated)
            yield name, _first(kind), info


def _first(hint: Any) -> Any:
    """Return what it is where it is not None."""
    return get_args(hint)[0] if get_origin(hint) in (Union, types.UnionType) else hint


def given(command: str, name: str, info: Any, value: str) -> list[str]:
    """Return the command line with this value in its place."""
    rest = list(GOOD.get(command, []))
    if type(info).__name__ == "OptionInfo":
        flag = info.param_decls[0] if info.param_decls else f"--{name.replace('_', '-')}"
        if flag in rest:
            place = rest.index(flag)
            del rest[place : place + 2]
        return [command, f"{flag}={value}", *rest]
    place = {"version": 1}.get(name, 0)
    options = [each for each in rest if each.startswith("--")]
    words = rest[: rest.index(options[0])] if options else list(rest)
    words[place : place + 1] = [value]
    return [command, *rest[len(words) :], "--", *words]


def cases() -> Iterator[Any]:
    for command in COMMANDS:
        for name, kind, info in arguments_of(command):
            if kind in (int, float) or name in ("version", "nbytes"):
                yield pytest.param(command, name, info, NO_NUMBERS, id=f"{command}-{name}")
            elif name in NAMES and kind is str:
                yield pytest.param(command, name, info, NO_NAMES, id=f"{command}-{name}")


@pytest.mark.parametrize(("command", "name", "info", "values"), list(cases()))
def test_what_can_not_be_is_one_line(
    command: str, name: str, info: Any, values: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in values:
        ended = CliRunner().invoke(app, given(command, name, info, value))
        assert (ended.exit_code, ended.stdout) == (2, ""), (value, ended.stderr)
        assert ended.stderr.count("\n") == 1, value
        assert ended.stderr.startswith("tensorhub: ")
        assert "Input should" not in ended.stderr
        assert len(ended.stderr) < 400


@pytest.mark.parametrize("address", ["junk", "http://127.0.0.1", "nats://", "nats://127.0.0.1:99999", ","])
@pytest.mark.parametrize("command", [each for each in COMMANDS if "nats" in get_type_hints(COMMANDS[each])])
def test_no_address_of_nats_is_one_line(command: str, address: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, [command, "--nats", address, "--dir", str(tmp_path), *GOOD.get(command, [])])
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull", "policy", "-"], "not written to stdout"),
        (["pull", "policy", "{folder}"], "is a directory"),
        (["pull", "policy", "/dev/full"], "no regular file"),
        (["pull", "policy", "{folder}/none/out"], "there is no directory"),
        (["pull", "policy", "{folder}/" + "x" * 300], "can't be written: File name too long"),
        (["publish", "policy", "-"], "not read from stdin"),
        (["publish", "policy", "{folder}"], "no regular file"),
        (["publish", "policy", "/dev/zero"], "no regular file"),
        (["publish", "policy", "{folder}/none"], "can't be read: No such file"),
        (["publish", "policy", "{folder}/" + "x" * 300], "can't be read: File name too long"),
        (["simulate", "elastic", "--picture", "/dev/full"], "no regular file"),
        (["demo", "--attach", "{folder}/none"], "no agent's socket"),
        (["delete"], "name a MODEL, or with --job a whole job"),
        (["delete", "policy", "--forget"], "leave MODEL out"),
        (["up", "--nats-nodes", "2"], "take 1, 3 or 5"),
        (["up", "--agents", "1", "--hosts", "2"], "2 hosts need as many agents"),
        (["trace", ""], "trace"),
        (["credentials", "{folder}", "--renew", "none"], "there is no key 'none'"),
        (["nonsense"], "no such command"),
        (["status", "--nonsense"], "no such option"),
        (["versions"], "missing"),
        (["versions", "policy", "other"], "unexpected"),
        (["retain", "policy"], "--last"),
    ],
)
def test_what_can_be_no_file_or_place_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, [each.replace("{folder}", str(tmp_path)) for each in arguments])
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert words in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_name_on_disk_may_be_any_bytes(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["publish", "policy", str(tmp_path / "\udcff\udcfe")])
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)


def test_a_call_for_which_no_time_is_left_is_not_made() -> None:
    """Made all the same, it would say that nobody answered, and nobody was asked."""
    bound = CommandDeadline(0.0)
    assert bound.ends_within(0.0)
    with pytest.raises(tensorhub.TensorHubError, match="within 0 s, and was asking the registry then"):
        bound.left_s("asking the registry")


def test_a_call_gets_a_little_less_than_what_is_left() -> None:
    """So that its own error comes before that of the command."""
    bound = CommandDeadline(1000.0)
    assert not bound.ends_within(10.0)
    assert 10.0 < bound.left_s("asking the registry") < 1000.0
    assert bound.ends_within(1000.0)
