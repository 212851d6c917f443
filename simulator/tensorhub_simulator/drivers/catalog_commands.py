"""Commands by chance: mostly what an agent could sensibly send next, sometimes late, repeated, foreign or nonsense.

One generator for hypothesis and for seeded runs: it asks `pick` for every choice and looks at nothing but the catalog.
`DrawnCommands` draws what agents and registries send. `DrawnRulings` draws also what users rule and what the agents of
cache replicas send.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tensorhub_common.catalog.state import Replica, Shard
from tensorhub_common.catalog.transitions import AgentState, RoundState, ShardState
from tensorhub_common.protocol.log.commands import (
    VERSION_MAX,
    AnyCommand,
    Delete,
    DeleteJob,
    DrainAgent,
    Drained,
    Drop,
    EndHold,
    Expire,
    Filled,
    GiveUp,
    Granted,
    HeldShard,
    Hold,
    Join,
    Lead,
    Pin,
    Publish,
    Quota,
    Ready,
    Register,
    Release,
    Replan,
    Retain,
    Rewind,
    Sender,
    Settle,
    Stay,
    Unpin,
    Unpublish,
    Unreadable,
    Want,
    Withdraw,
)
from tensorhub_simulator.drivers.catalog import MODEL, REGISTRY, CatalogDriver, root

Pick = Callable[[Sequence[Any]], Any]

AGENTS = ("a", "b", "c")
SHARDS = {"trainer": 2, "engine": 2, "copy": 1, "view": 1}
KEYS = tuple((replica, shard) for replica, shards in SHARDS.items() for shard in range(shards))
NONSENSE_NUMBERS = (-1, 0, 2**31, VERSION_MAX, VERSION_MAX + 1, 10**40)
NONSENSE_WORDS = ("", "_hub", "a.b", "x" * 300, "ü", "\x00", "nobody", "*")

VERBS = (
    "join",
    "register",
    "ready",
    "withdraw",
    "unpublish",
    "drained",
    "want",
    "settle",
    "give_up",
    "granted",
    "replan",
    "filled",
    "release",
    "publish",
    "expire",
    "lead",
    "repeat",
    "unreadable",
)


class DrawnCommands:
    """Draws the next command."""

    def __init__(self, world: CatalogDriver, pick: Pick) -> None:
        self.world, self.pick = world, pick
        self._n = 0
        self._honest = True
        self._target = KEYS[0]

    def often(self, usual: Any, *rare: Any) -> Any:
        """Take the usual value; of a command that is to be odd, half the time another one."""
        return usual if self._honest or self.pick((True, False)) else self.pick(rare)

    def command(self) -> AnyCommand | Unreadable:
        """Draw a command."""
        self._honest = bool(self.pick(range(6)))
        self._target = self.pick(KEYS)
        verb = self._sensible() if self.pick(range(5)) else self.pick(VERBS)
        if verb == "unreadable":
            return Unreadable("publish", "no command")
        if verb == "repeat":
            return self.pick([command for _, _, command in self.world.log[-8:]] or [Unreadable("", "")])  # type: ignore[no-any-return]
        drawn: AnyCommand = getattr(self, f"_{verb}")()
        return drawn

    def _sensible(self) -> str:
        """Name what somebody could well do next with the shard that the command is about."""
        model = self.world.catalog.models.get(MODEL)
        replica = model.replicas.get(self._target[0]) if model is not None else None
        shard = replica.members.get(self._target[1]) if replica is not None else None
        if replica is None or shard is None:
            joined = len(self.world.catalog.agents) == len(AGENTS)
            return "register" if joined else "join"
        if self.world.catalog.agents[shard.agent].state is AgentState.LOST:
            return str(self.pick(("join", "join", "register")))
        current = replica.round
        if current is not None and shard.index in current.wants:
            choices = {
                RoundState.JOINING: ("want", "settle", "give_up", "publish"),
                RoundState.DECIDED: (*["granted"] * 6, "filled", "replan", "give_up"),
                RoundState.STARTED: ("filled", "filled", "give_up"),
            }[current.state]
            return str(self.pick(choices))
        if shard.index in replica.offers:
            return str(self.pick(("withdraw", "publish", "expire")))
        return str(
            self.pick(
                {
                    ShardState.EMPTY: ("ready", "ready", "want", "want", "want", "release"),
                    ShardState.READY: ("unpublish", "unpublish", "want", "want", "ready"),
                    ShardState.DRAINING: ("drained", "drained", "drained", "release"),
                }[shard.state]
            )
        )

    # Who.

    def _sender(self, agent: str, lane: int | None) -> Sender:
        self._n += 1
        known = self.world.catalog.agents.get(agent)
        incarnation = 1 if known is None else known.incarnation
        name = agent if lane is None else f"{agent}/{lane}"
        return Sender(
            self.often(name, *NONSENSE_WORDS, f"{agent}/007", f"{agent}/x"),
            self.often(incarnation, incarnation - 1, incarnation + 1, *NONSENSE_NUMBERS),
            self.often(self._n, 1, self._n + 1, -1, 10**40),
        )

    def _shard(self) -> tuple[dict[str, Any], Shard | None]:
        """Draw a shard; what its command names, and the shard as it stands."""
        replica, index = self._target
        model = self.world.catalog.models.get(MODEL)
        known = model.replicas.get(replica) if model is not None else None
        shard = known.members.get(index) if known is not None else None
        owner = self.pick(AGENTS) if shard is None else self.often(shard.agent, *AGENTS)
        return {
            "by": self._sender(owner, KEYS.index((replica, index))),
            "model": self.often(MODEL, *NONSENSE_WORDS),
            "replica": self.often(replica, *NONSENSE_WORDS),
            "shard": self.often(index, *NONSENSE_NUMBERS),
        }, shard

    def _round(self, about: dict[str, Any]) -> tuple[int, int, int]:
        """Return number, attempt and version of the round of the shard's replica, or what is none."""
        model = self.world.catalog.models.get(MODEL)
        known = model.replicas.get(about["replica"]) if model is not None else None
        if known is None or known.round is None:
            return (0, 0, 0)
        return (known.round.number, known.round.attempt, known.round.version or 0)

    def _version(self) -> int | None:
        model = self.world.catalog.models.get(MODEL)
        last = (model.last if model is not None else None) or 0
        version: int | None = self.pick((None, last, last + 1, last + 1, last + 1, last + 2))
        return self.often(version, *NONSENSE_NUMBERS)  # type: ignore[no-any-return]

    def _digest(self, version: int | None, shard: Shard | None, index: int) -> str:
        layout = "L" if shard is None else shard.layout
        model = self.world.catalog.models.get(MODEL)
        last = (model.last if model is not None else None) or 0
        return str(self.often(root(last + 1 if version is None else version, index, layout), "other", "x" * 500, ""))

    # What.

    def _join(self) -> Join:
        agent = self.pick(AGENTS)
        known = self.world.catalog.agents.get(agent)
        after = 1 if known is None else known.incarnation + 1
        holds = tuple(
            HeldShard(model=model, replica=replica, shard=index, version=self.often(version, 3), root=digest)
            for (model, replica, index), version, digest in self._memory(agent)
            if self.often(1, 0)
        )
        strange = (HeldShard(model=MODEL, replica="nobody", shard=3, version=1, root="x"),)
        by = Sender(agent, self.often(after, after - 1, *NONSENSE_NUMBERS), self._n)
        return Join(
            by=by, host=self.often("host-0", *NONSENSE_WORDS), site="site-0", holds=self.often(holds, holds + strange)
        )

    def _memory(self, agent: str) -> list[tuple[tuple[str, str, int], int | None, str | None]]:
        """Return what the agent's memory holds by the last word of the log, also where the log no longer counts it."""
        known = self.world.catalog.agents.get(agent)
        memory = []
        for key in known.shards if known is not None else ():
            replica = self.world.catalog.models[key[0]].replicas[key[1]]
            shard = replica.members[key[2]]
            last = self.world.catalog.models[key[0]].last
            version = shard.version if shard.version is not None else self.pick((None, last))
            memory.append((key, version, None if version is None else root(version, key[2], shard.layout)))
        return memory

    def _register(self) -> Register:
        about, shard = self._shard()
        shards = SHARDS.get(about["replica"], 1)
        layout = "L" if shard is None else shard.layout
        return Register(
            **about,
            shards=self.often(shards, shards + 1, *NONSENSE_NUMBERS),
            spot=self.often(about["replica"] == "copy", about["replica"] != "copy"),
            layout=self.often(layout, "K", "", "x" * 500),
            nbytes=self.often(64, *NONSENSE_NUMBERS),
            mapped=self.often(about["replica"] == "view", about["replica"] != "view"),
        )

    def _ready(self) -> Ready:
        about, shard = self._shard()
        version = self._version()
        return Ready(**about, version=version, root=self._digest(version, shard, about["shard"]))

    def _want(self) -> Want:
        about, _ = self._shard()
        last = self._version()
        wish = self.pick(("latest", "latest", "latest", "newer", "newer", 0 if last is None else last))
        return Want(**about, want=wish, patient=self.pick((True, False)), staged=self.pick((False, False, True)))

    def _filled(self) -> Filled:
        about, shard = self._shard()
        number, attempt, version = self._round(about)
        return Filled(
            **about,
            round=self.often(number, 0, *NONSENSE_NUMBERS),
            version=self.often(version, *NONSENSE_NUMBERS),
            root=self._digest(version, shard, about["shard"]),
            waits=self.pick((True, False)),
            attempt=self.pick((None, attempt, attempt, attempt - 1)),
        )

    def _granted(self) -> Granted:
        about, _ = self._shard()
        number, attempt, _ = self._round(about)
        return Granted(**about, round=self.often(number, 0), attempt=self.often(attempt, attempt - 1, 10**40))

    def _replan(self) -> Replan:
        about, _ = self._shard()
        number, attempt, _ = self._round(about)
        return Replan(**about, round=self.often(number, 0), attempt=self.often(attempt, attempt - 1, 10**40))

    def _settle(self) -> Settle:
        about, _ = self._shard()
        return Settle(**about, round=self.often(self._round(about)[0], 0, *NONSENSE_NUMBERS))

    def _give_up(self) -> GiveUp:
        about, _ = self._shard()
        number = self.often(self._round(about)[0], None, *NONSENSE_NUMBERS)
        error = self.pick((*["VersionUnavailable"] * 4, "RoundTimeout", "Nonsense"))
        return GiveUp(**about, round=number, error=error, message=self.often("why", "x" * 10_000))

    def _withdraw(self) -> Withdraw:
        return Withdraw(**self._shard()[0])

    def _unpublish(self) -> Unpublish:
        return Unpublish(**self._shard()[0])

    def _drained(self) -> Drained:
        return Drained(**self._shard()[0])

    def _release(self) -> Release:
        return Release(**self._shard()[0])

    def _publish(self) -> Publish:
        about, _ = self._shard()
        return Publish(model=about["model"], replica=about["replica"], version=self._version())

    def _lead(self) -> Lead:
        term = self.world.catalog.term
        self._n += 1
        by = Sender(self.often(REGISTRY, self.pick(AGENTS)), self.often(term + 1, term, 0), self._n)
        return Lead(
            by=by, registry=self.often("registry-0", *NONSENSE_WORDS), term=self.often(term + 1, term, -1, 10**40)
        )

    def _expire(self) -> Expire:
        agent = self.pick(AGENTS)
        known = self.world.catalog.agents.get(agent)
        term = self.world.catalog.term
        self._n += 1
        return Expire(
            by=Sender(self.often(REGISTRY, agent), self.often(term, 0, term + 1), self._n),
            agent=agent,
            incarnation=self.often(0 if known is None else known.incarnation, *NONSENSE_NUMBERS),
            term=self.often(term, term + 1, -1, 10**40),
        )


ROOMS = (0, 64, 128, 1024)
CACHE_LANE = 900
HOLDERS = ("rollouts", "other")
END_ODDS = 8
"""A job is deleted so rarely that most of a life lies before it."""


class DrawnRulings(DrawnCommands):
    """Draws also what users rule, and what the agents of cache replicas say."""

    def command(self) -> AnyCommand | Unreadable:
        if self.pick(range(9)) == 0:
            return self._ruling()
        caches = [key for key in self._caches() if self.pick((True, False))]
        if caches and self.pick(range(3)) == 0:
            self._honest = bool(self.pick(range(6)))
            self._target = self.pick(caches)
            drawn: AnyCommand = getattr(self, f"_{self._sensible()}")()
            return drawn
        return super().command()

    def _caches(self) -> list[tuple[str, int]]:
        model = self.world.catalog.models.get(MODEL)
        replicas = model.replicas.values() if model is not None else ()
        return [(r.name, index) for r in replicas if r.cache is not None for index in r.members]

    def _record(self) -> Replica | None:
        model = self.world.catalog.models.get(MODEL)
        return model.replicas.get(self._target[0]) if model is not None else None

    def _sensible(self) -> str:
        verb = super()._sensible()
        replica = self._record()
        shard = replica.members.get(self._target[1]) if replica is not None else None
        if replica is None or shard is None:
            return verb
        if shard.leaving and self.pick((True, False)):
            return "stay"
        if replica.round is not None and replica.round.state is RoundState.STARTED and self.pick(range(4)) == 0:
            return "drop"
        if replica.cache is not None and replica.round is None and verb != "join":
            if shard.state is ShardState.EMPTY:
                return str(self.pick(("want",) * 8 + ("release",)))
            return "want"
        return verb

    def _shard(self) -> tuple[dict[str, Any], Shard | None]:
        replica, index = self._target
        if (replica, index) in KEYS:
            return super()._shard()
        record = self._record()
        shard = record.members[index] if record is not None else None
        assert shard is not None
        by = self._sender(shard.agent, CACHE_LANE + index)
        return {"by": by, "model": MODEL, "replica": replica, "shard": index}, shard

    def _want(self) -> Want:
        record = self._record()
        if record is None or record.cache is None:
            drawn = super()._want()
            return Want(**{**_fields(drawn), "supersede": self.pick((True, True, False))})
        return Want(**self._shard()[0], want=record.cache)

    def _unpublish(self) -> Unpublish:
        return Unpublish(**self._shard()[0], void=self.pick((False, False, False, True)))

    def _stay(self) -> Stay:
        return Stay(**self._shard()[0])

    def _drop(self) -> Drop:
        about, _ = self._shard()
        number, attempt, _ = self._round(about)
        return Drop(**about, round=number, attempt=self.often(attempt, attempt - 1))

    def _join(self) -> Join:
        return Join(**{**_fields(super()._join()), "cache_bytes": self.pick(ROOMS)})

    def _ruling(self) -> AnyCommand:
        version = self._version() or 1
        agent = self.pick(AGENTS)
        kind = self.pick(
            ("retain",) * 6
            + ("hold", "hold", "end_hold", "pin", "unpin", "rewind", "drain", "drain", "quota", "delete", "end")
        )
        match kind:
            case "retain":
                return Retain(model=MODEL, last=self.pick((0, 1, 1, 1, 2, 2, -1, 33)))
            case "pin":
                return Pin(model=MODEL, version=version)
            case "unpin":
                return Unpin(model=MODEL, version=version)
            case "hold":
                return self._hold(version)
            case "end_hold":
                self._n += 1
                term = self.world.catalog.term
                by = Sender(REGISTRY, term, self._n)
                return EndHold(by=by, model=MODEL, holder=self.pick(HOLDERS), term=term)
            case "rewind":
                return Rewind(model=MODEL, to=max(0, version - self.pick((0, 1, 2))))
            case "drain":
                return DrainAgent(agent=agent, on=self.pick((True, False, False)))
            case "quota":
                return Quota(nbytes=self.pick((0, 0, 256, 1024)))
            case "end" if self.pick(range(END_ODDS)) == 0:
                return DeleteJob(by=self.often(None, self._sender(agent, None)))
        return Delete(model=MODEL)

    def _hold(self, version: int) -> Hold:
        """Hold some of the last versions, or none, mostly with a higher number than before."""
        model, holder = self.world.catalog.models.get(MODEL), self.pick(HOLDERS)
        known = model.holds.get(holder) if model is not None else None
        n = 1 if known is None else known.n + self.pick((1, 1, 1, 0, -1))
        versions = self.pick(((version,), (version, max(0, version - 1)), ()))
        return Hold(model=MODEL, holder=holder, term=1, n=n, versions=versions, lasts_s=self.pick((2, 20, 600, 0)))


def _fields(command: AnyCommand) -> dict[str, Any]:
    return {name: getattr(command, name) for name in command.__struct_fields__}
