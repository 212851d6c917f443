"""Whatever a caller passes, each call takes it or refuses it at once, in a sentence, with nothing sent to the agent."""

import copy
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.unit.client.fake_agent import FakeAgent

import tensorhub
from tensorhub import AsyncHub, AsyncShard, TensorHubError, arguments
from tensorhub_common.protocol.log.commands import VERSION_MAX
from tensorhub_common.protocol.log.events import KINDS

HUGE: Final = 10**5000
"""More digits than Python writes out."""


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


NEITHER: Final[tuple[Any, ...]] = (True, b"3", [], object(), Unshowable())
NO_SECONDS: Final = (*NEITHER, None, "3", np.True_, {}, 1j, Decimal(3), torch.tensor(3.0))
OUT_OF_RANGE: Final = (-1, -0.001, math.nan, math.inf, -math.inf, HUGE, -HUGE, 1e308, np.float32("inf"))
NO_NUMBERS: Final = (*NEITHER, "1", 1.5, math.nan, torch.ones(2), np.ones(3))


def test_what_is_taken_whosever_number_it_is() -> None:
    for seconds in (0, 1, 2.5, np.float32(2.5), np.int64(3), Fraction(5, 2), -0.0):
        assert arguments.seconds("timeout_s", seconds) == float(seconds)
    for version in (3, np.int64(3), torch.tensor(3)):
        assert (arguments.published_version(version), arguments.wanted_version(version)) == (3, 3)
    assert (arguments.published_version(None), arguments.wanted_version("latest")) == (None, "latest")
    assert [arguments.patience(wait_s, 10.0) for wait_s in (3, 30, math.inf)] == [3, 10, 10]
    assert arguments.shard_of(4095, 4096) == (4095, 4096)
    assert (arguments.seen(arguments.SEQ_MAX), arguments.seen(None)) == (arguments.SEQ_MAX, None)
    assert (arguments.kinds((), KINDS), arguments.kinds(None, KINDS)) == (frozenset(), None)
    assert {"version.published", "replica.ready", "round.failed"} <= KINDS


@pytest.mark.parametrize(
    ("check", "error", "said"),
    [
        *((lambda no=no: arguments.seconds("x", no), TypeError, "x is a number of seconds; got ") for no in NO_SECONDS),
        *((lambda no=no: arguments.seconds("x", no), ValueError, "from 0 to 604800") for no in OUT_OF_RANGE),
        (lambda: arguments.wanted_version("newest"), TypeError, "latest"),
        (lambda: arguments.published_version(VERSION_MAX + 1), tensorhub.VersionConflict, "out of range"),
        (lambda: arguments.wanted_version(VERSION_MAX + 1), tensorhub.VersionUnavailable, "out of range"),
        *(
            (lambda at=at: arguments.shard_of(*at), tensorhub.LayoutMismatch, "shard")
            for at in ((1, 1), (2, 2), (0, 0))
        ),
        (lambda: arguments.shard_of(0, 4097), tensorhub.LayoutMismatch, "4097 shards .* give shards from 1 to 4096"),
        (lambda: arguments.seen(-1), ValueError, "give the seq of an event"),
        (lambda: arguments.seen(arguments.SEQ_MAX + 1), ValueError, "give the seq of an event"),
        (lambda: arguments.kinds(["version.publish"], KINDS), ValueError, r"no events of kind .*version\.published"),
        (lambda: arguments.kinds("version.published", KINDS), TypeError, "collection of kinds"),
        (lambda: arguments.kinds(5, KINDS), TypeError, "collection of kinds"),
        (lambda: arguments.install("elsewhere"), ValueError, "'in-place', 'staged', 'mapped'"),
        (lambda: arguments.mapping({"q": "k"}), TypeError, r"mapping is a tensorhub\.mapping\.Mapping"),
        (lambda: arguments.resume("both"), ValueError, "possible are None, 'memory', 'values'"),
    ],
)
def test_what_is_refused_says_what_is_possible(check: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        check()


Call = Callable[[AsyncHub, AsyncShard, Any], Any]
BOUNDED: Final[dict[str, Call]] = {
    "register": lambda hub, _, s: hub.register("m", {"w": torch.ones(1)}, replica="r", timeout_s=s),
    "versions": lambda hub, _, s: hub.versions("m", timeout_s=s),
    "replicas": lambda hub, _, s: hub.replicas("m", timeout_s=s),
    "retain": lambda hub, _, s: hub.retain("m", last=1, timeout_s=s),
    "pin": lambda hub, _, s: hub.pin("m", 1, timeout_s=s),
    "unpin": lambda hub, _, s: hub.unpin("m", 1, timeout_s=s),
    "rewind": lambda hub, _, s: hub.rewind("m", to=1, timeout_s=s),
    "delete": lambda hub, _, s: hub.delete("m", timeout_s=s),
    "delete_job": lambda hub, _, s: hub.delete_job(timeout_s=s),
    "close": lambda hub, _, s: hub.close(timeout_s=s),
    "publish": lambda _, shard, s: shard.publish(timeout_s=s),
    "unpublish": lambda _, shard, s: shard.unpublish(timeout_s=s),
    "overwriting": lambda _, shard, s: shard.overwriting(timeout_s=s).__aenter__(),
    "replicate": lambda _, shard, s: shard.replicate(timeout_s=s),
    "update": lambda _, shard, s: shard.update(timeout_s=s),
    "update wait_s": lambda _, shard, s: shard.update(wait_s=-1.0 if s == math.inf else s),
    "release": lambda _, shard, s: shard.release(timeout_s=s),
}
NUMBERED: Final[dict[str, Call]] = {
    "shard": lambda hub, _, n: hub.register("m", {"w": torch.ones(1)}, replica="r", shard=n),
    "shards": lambda hub, _, n: hub.register("m", {"w": torch.ones(1)}, replica="r", shards=n),
    "last": lambda hub, _, n: hub.retain("m", last=n),
    "pin": lambda hub, _, n: hub.pin("m", n),
    "unpin": lambda hub, _, n: hub.unpin("m", n),
    "to": lambda hub, _, n: hub.rewind("m", to=n),
    "publish": lambda _, shard, n: shard.publish(n),
    "replicate": lambda _, shard, n: shard.replicate(n),
}
FLAGS: Final[dict[str, Call]] = {
    "spot": lambda hub, _, x: hub.register("m", {"w": torch.ones(1)}, replica="r", spot=x),
    "release": lambda hub, _, x: hub.close(release=x),
    "publish": lambda _, shard, x: shard.overwriting(publish=x).__aenter__(),
}
OTHERS: Final[dict[str, Call]] = {
    "on_progress": lambda _, shard, x: shard.replicate(on_progress=x),
    "on_progress is": lambda _, shard, x: shard.update(on_progress=x),
    "swap_under": lambda _, shard, x: shard.replicate(swap_under=x),
    "swap_under is": lambda _, shard, x: shard.update(swap_under=x),
    "mapping": lambda hub, _, x: hub.register("m", {"w": torch.ones(1)}, replica="r", mapping=x),
    "install": lambda hub, _, x: hub.register("m", {"w": torch.ones(1)}, replica="r", install=x),
    "resume": lambda hub, _, x: hub.register("m", {"w": torch.ones(1)}, replica="r", resume=x),
}
NAMES: Final = ("", " ", "a b", "a.b", "a/b", "ä", "_x", "x" * 65, "a\n", "\ud800", None, 7, b"x", HUGE, Unshowable())
NAMED: Final[dict[str, Call]] = {
    "model": lambda hub, _, value: hub.register(value, {"w": torch.ones(1)}, replica="r"),
    "replica": lambda hub, _, value: hub.register("m", {"w": torch.ones(1)}, replica=value),
    "connect": lambda hub, _, value: tensorhub.connect_async("" if value is None else value),
    "versions": lambda hub, _, value: hub.versions(value),
    "replicas": lambda hub, _, value: hub.replicas(value),
    "retain": lambda hub, _, value: hub.retain(value, last=1),
    "rewind": lambda hub, _, value: hub.rewind(value, to=1),
    "delete": lambda hub, _, value: hub.delete(value),
    "watch": lambda hub, _, value: anext(hub.watch(value)),
}
NO_FLAGS: Final[tuple[Any, ...]] = (None, 0, 1, "no", "", [], torch.ones(1, dtype=torch.bool), Unshowable())
CALLS: Final = (
    *((name, call, (*NO_SECONDS, *OUT_OF_RANGE)) for name, call in BOUNDED.items()),
    *((name, call, (*NO_NUMBERS, -1, 2**53, 2**63, 2**64, HUGE, -HUGE)) for name, call in NUMBERED.items()),
    *((name, call, NO_FLAGS) for name, call in FLAGS.items()),
    *((name, call, (0, 1, "x", b"x", [1], {1: 2}, torch.ones(2), Unshowable())) for name, call in OTHERS.items()),
    *((name, call, NAMES) for name, call in NAMED.items()),
)


@pytest.mark.parametrize(("call", "values"), [pytest.param(*rest, id=name) for name, *rest in CALLS])
async def test_a_mistake_sends_nothing(agent: FakeAgent, hub: AsyncHub, call: Call, values: tuple[Any, ...]) -> None:
    shard = await hub.register("policy", {"w": torch.ones(1)}, replica="trainer")
    sent = len(agent.frames)
    for value in values:
        with pytest.raises((TypeError, ValueError, TensorHubError)) as told:
            await call(hub, shard, value)
        assert len(str(told.value)) < 400, value if not isinstance(value, Unshowable) else "unshowable"
        assert "string conversion" not in str(told.value), "Python's own words for a number that it does not write out"
    assert len(agent.frames) == sent


async def test_where_nats_is_and_a_mask_that_would_be_dropped(agent: FakeAgent, hub: AsyncHub) -> None:
    wrong: tuple[Any, ...] = (7, b"nats://x", [], True)
    for nats in wrong:
        with pytest.raises(TypeError, match="nats is text"):
            await tensorhub.connect_async(agent=agent.path, nats=nats)
    assert agent.attached == 1
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(tensorhub.LayoutMismatch, match=r"call \.filled"):
        await hub.register("m", {"w": masked}, replica="r")


def test_what_is_a_connection_can_not_be_copied_or_pickled(agent: FakeAgent) -> None:
    with tensorhub.connect(agent=agent.path) as hub:
        shard = hub.register("policy", {"w": torch.ones(1)}, replica="trainer")
        for thing in (hub, shard, hub._twin, shard._twin):
            for make in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=r"call tensorhub\.connect\(\) where it is wanted"):
                    make(thing)
    with pytest.raises(tensorhub.AgentUnavailable, match="this hub is closed"):
        hub.__enter__()
    assert copy.deepcopy(tensorhub.NotFilled("x")).args == ("x",)
