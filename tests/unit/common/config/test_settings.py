"""Settings: what is read, and what is refused and with which words."""

import re
import types
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from tools.docs.settings_page import table_markdown, with_table

from tensorhub_common.config import settings
from tensorhub_common.config.settings import InvalidSetting, Settings, load, unknown_variables
from tensorhub_common.protocol.subjects import is_name


def _fits(value: object, annotation: object) -> bool:
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if get_origin(annotation) is frozenset:
        return isinstance(value, frozenset) and all(_fits(each, *get_args(annotation)) for each in value)
    if isinstance(annotation, types.UnionType):
        return any(_fits(value, each) for each in get_args(annotation))
    return type(value) is annotation or (isinstance(annotation, type) and issubclass(annotation, Path))


def test_an_empty_environment_gives_the_defaults() -> None:
    loaded = load({})
    assert loaded.nats is None
    assert loaded.dir == Path(".tensorhub")
    assert (loaded.beat_s, loaded.lost_after_s, loaded.leader_ttl_s) == (0.5, 3.0, 2.0)
    assert (loaded.stall_s, loaded.refill_drain_s, loaded.sources_lost_s) == (5.0, 0.0, 1.2)
    assert loaded.window_bytes == 64 * 1024 * 1024
    assert (loaded.memory_bytes_max, loaded.copy_threads, loaded.digests) == (0, 0, True)
    assert (loaded.job, loaded.site) == ("default", "site-0")
    assert (loaded.registry_id, loaded.planner_id) == ("registry-0", "planner-0")
    assert is_name(loaded.host)
    for name, hint in get_type_hints(Settings).items():
        assert _fits(getattr(loaded, name), hint), name


@pytest.mark.parametrize("name", settings.VARIABLES)
def test_every_example_is_a_good_value_of_its_variable(name: str) -> None:
    variable = settings.VARIABLES[name]
    loaded = load({name: variable.example})
    assert getattr(loaded, name.removeprefix("TENSORHUB_").lower()) == variable.parse(variable.example)


def test_defaults_follow_the_variables_that_they_name() -> None:
    loaded = load({"TENSORHUB_DIR": "/hub", "TENSORHUB_HOST": "node-12"})
    assert loaded.agent_id == "node-12-0"
    assert loaded.socket == Path("/hub/node-12-0.sock")
    assert loaded.state_dir == Path("/hub/node-12-0")
    assert load({"TENSORHUB_DIR": "/hub", "TENSORHUB_AGENT_ID": "a"}).socket == Path("/hub/a.sock")
    # A default is not expanded twice, and a blank line of an environment file is none.
    assert load({"TENSORHUB_DIR": "/hub/$TENSORHUB_JOB"}).state_dir.parent == Path("/hub/$TENSORHUB_JOB")
    assert load({"TENSORHUB_SITE": "", "TENSORHUB_BEAT_S": "  "}) == load({})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("agent", "/run/tensorhub/a.sock", "/run/tensorhub/a.sock"),
        ("agent", "./a.sock", "./a.sock"),
        ("agent", "node-12-0", "node-12-0"),
        ("window_bytes", "1048576", 1 << 20),
        ("window_bytes", "64MiB", 64 << 20),
        ("window_bytes", "2 GiB", 2 << 30),
        ("window_bytes", "1TiB", 1 << 40),
        ("nats", "tls://a:4222, tls://b:4222", "tls://a:4222,tls://b:4222"),
        ("rollout_terms_off", "seeding, retention", {"retention", "seeding"}),
    ],
)
def test_what_a_value_is_read_as(name: str, text: str, value: object) -> None:
    found = getattr(load({f"TENSORHUB_{name.upper()}": text}), name)
    assert (Path(found) == Path(str(value))) if name == "agent" else (found == value)


@pytest.mark.parametrize(
    ("environ", "wrong"),
    [
        ({"TENSORHUB_NATS": "127.0.0.1:4222"}, "must be the address of a NATS server"),
        ({"TENSORHUB_NATS": "http://127.0.0.1"}, "must be the address of a NATS server"),
        ({"TENSORHUB_NATS": "user:hunter2@127.0.0.1"}, "must be the address of a NATS server"),
        ({"TENSORHUB_NATS": "nats://"}, "must be the address of a NATS server"),
        ({"TENSORHUB_NATS": "nats://h:70000"}, "must be the address of a NATS server"),
        ({"TENSORHUB_NATS": "nats://a:1,b:1"}, "each address whole, with commas between"),
        ({"TENSORHUB_NATS": "nats://a:1,"}, "each address whole"),
        ({"TENSORHUB_NATS": "nats://a:1,ws://b:1"}, "must not mix"),
        ({"TENSORHUB_DIR": "a\0b"}, "zero byte"),
        ({"TENSORHUB_JOB": "run.7"}, "job name 'run.7' can't be used"),
        ({"TENSORHUB_SITE": "_inner"}, "kept for the hub itself"),
        ({"TENSORHUB_RACK": "row 7"}, "rack name 'row 7' can't be used"),
        ({"TENSORHUB_AGENT": "a b"}, "agent name 'a b' can't be used"),
        ({"TENSORHUB_BEAT_S": "0,5"}, "is 0,5 and must be a number of seconds above 0"),
        ({"TENSORHUB_BEAT_S": "0"}, "above 0"),
        ({"TENSORHUB_STALL_S": "nan"}, "must be a number of seconds"),
        ({"TENSORHUB_STALL_S": "inf"}, "must be a number of seconds"),
        ({"TENSORHUB_REFILL_DRAIN_S": "-1"}, "of at least 0"),
        ({"TENSORHUB_LEADER_TTL_S": "0.5"}, "of at least 1"),
        ({"TENSORHUB_WINDOW_BYTES": "64MB"}, "KiB, MiB, GiB or TiB"),
        ({"TENSORHUB_WINDOW_BYTES": "1"}, "of at least 1048576"),
        ({"TENSORHUB_MEMORY_BYTES_MAX": "-1"}, "must be a whole number of bytes"),
        ({"TENSORHUB_COPY_THREADS": "2.5"}, "must be a whole number from 0 to 9999"),
        ({"TENSORHUB_COPY_THREADS": "٣"}, "must be a whole number from 0 to 9999"),
        ({"TENSORHUB_DIGESTS": "yes"}, "must be on or off"),
        ({"TENSORHUB_LOG_LEVEL": "loud"}, "must be debug, info, warning or error"),
        ({"TENSORHUB_LOG_FORMAT": "xml"}, "must be console or json"),
        (
            {"TENSORHUB_ROLLOUT_TERMS_OFF": "seeding,moves"},
            "must be of activation, admission, migration, retention, seeding, with commas between: 'moves' is none",
        ),
    ],
)
def test_a_bad_value_is_refused_with_its_name_its_fault_and_an_example(environ: Mapping[str, str], wrong: str) -> None:
    (name,) = environ
    with pytest.raises(InvalidSetting) as caught:
        load(environ)
    said = str(caught.value)
    assert said.startswith(name)
    assert wrong in said
    assert f"for example {name}={settings.VARIABLES[name].example}" in said
    assert "hunter2" not in said, "a password is not repeated"


def test_agents_can_not_be_lost_between_two_beats() -> None:
    with pytest.raises(InvalidSetting, match=r"TENSORHUB_LOST_AFTER_S is 2 and TENSORHUB_BEAT_S 2.*for example"):
        load({"TENSORHUB_BEAT_S": "2", "TENSORHUB_LOST_AFTER_S": "2"})
    # What it advises can be used as it stands.
    with pytest.raises(InvalidSetting, match=r"for example TENSORHUB_LOST_AFTER_S=30, or the second shorter$"):
        load({"TENSORHUB_BEAT_S": "5"})
    assert load({"TENSORHUB_BEAT_S": "5", "TENSORHUB_LOST_AFTER_S": "30"}).lost_after_s == 30


def test_a_variable_that_is_no_setting_is_told_with_what_may_be_meant() -> None:
    environ = {
        "TENSORHUB_BEATS": "2",
        "TENSORHUB_COLOUR": "red",
        "TENSORHUB_JOB": "run-7",
        "HOME": "/",
        # What Kubernetes sets for services that are called tensorhub-nats and tensorhub-registry.
        "TENSORHUB_NATS_SERVICE_HOST": "10.0.0.1",
        "TENSORHUB_NATS_PORT": "tcp://10.0.0.1:4222",
        "TENSORHUB_REGISTRY_PORT_4222_TCP_ADDR": "10.0.0.1",
        "TENSORHUB_REGISTRY_SERVICE_PORT_CLIENT": "4222",
    }
    assert unknown_variables(environ) == [
        "TENSORHUB_BEATS is set, which is no setting of TensorHub: is TENSORHUB_BEAT_S meant?",
        "TENSORHUB_COLOUR is set, which is no setting of TensorHub",
    ]
    assert unknown_variables(dict.fromkeys(settings.VARIABLES, "")) == []


@pytest.mark.parametrize(
    ("real", "made"),
    [("node1.dc.example", "node1-dc-example"), ("_-x", "x"), ("", "host"), ("...", "host"), ("n" * 64, "n" * 48)],
)
def test_a_real_host_name_is_made_a_valid_name(real: str, made: str) -> None:
    assert settings.host_name(real) == made
    assert is_name(made)


PAGE = Path(__file__).parents[4] / "docs" / "operate" / "settings.md"


def test_the_documentation_holds_the_table_of_the_code() -> None:
    """If this fails, run `make docs`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page
    named = re.findall(r"^\| `(TENSORHUB_\w+)` \|", table_markdown(), flags=re.MULTILINE)
    assert named == list(settings.VARIABLES)
    assert len(named) == len(fields(Settings))
    with pytest.raises(ValueError, match="lacks the markers"):
        with_table("# Settings\n")
