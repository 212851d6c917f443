"""A job whose agents and registry are the test: it writes commands into a real log, and asks a real planner."""

from itertools import count
from typing import Any, Final

import msgspec
import pytest
from tests.kit.waiting import retried, until_answer

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoAnswer
from tensorhub_common.jetstream import job_log
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.layout.layout import TensorEntry, encoded, layout_of, payload_bytes
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log import codec
from tensorhub_common.protocol.log.commands import Command, Filled, Granted, Join, Ready, Register, Sender, Want
from tensorhub_common.protocol.plans import Plan, PlanAnswer, PlanRequest, Refusal, SourceId
from tensorhub_common.protocol.queries import QueryError

MODEL = "policy"
ANSWER_S: Final = 10.0
"""A planner that has not answered by then never will: it drops a question that has waited as long as an agent does."""
ROOT = "0123456789abcdef" * 2
LAYOUT = layout_of(
    TensorEntry(f"layer-{n}", "bfloat16", 2, (1024, 1024 * 4), (1024, 1024 * 4), (0, 0)) for n in range(8)
)
"""64 MiB in 16 pieces."""


class Job:
    """A job in a real log. Every shard stands on an agent of its own, named after the replica."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.name = name
        self.last_seq = 0
        self.log = job_log.JobLog(bus, name)
        self._blobs = BlobStore(bus)
        self._n = count(1)

    async def open(self) -> None:
        await job_log.open_job(self.bus, self.name)
        await self._blobs.open(self.name)

    async def say(self, agent: str, command: Command) -> int:
        sender = Sender(agent, 1, next(self._n))
        body = codec.encode(msgspec.structs.replace(command, by=sender))
        verb = str(command.__struct_config__.tag)
        msg_id = f"{agent}-{sender.n}"
        self.last_seq = await self.log.append(subjects.command_subject(self.name, verb, agent), body, msg_id)
        return self.last_seq

    async def register(self, replica: str) -> None:
        """Let a replica of one shard stand on an agent of the same name."""
        digest = await self._blobs.put(self.name, encoded(LAYOUT))
        await self.say(replica, Join(host=f"host-of-{replica}", site="berlin"))
        nbytes = payload_bytes(LAYOUT)
        await self.say(replica, Register(model=MODEL, replica=replica, shard=0, shards=1, layout=digest, nbytes=nbytes))

    async def publish(self, replica: str, version: int) -> int:
        return await self.say(replica, Ready(model=MODEL, replica=replica, shard=0, version=version, root=ROOT))

    async def fetch(self, replica: str, version: int) -> int:
        number = await self.say(replica, Want(model=MODEL, replica=replica, shard=0, want=version))
        await self.say(replica, Granted(model=MODEL, replica=replica, shard=0, round=number, attempt=1))
        filled = Filled(model=MODEL, replica=replica, shard=0, round=number, version=version, root=ROOT)
        return await self.say(replica, filled)

    def demand(self, replica: str, version: int = 1, **rest: Any) -> PlanRequest:
        demand = PlanRequest(
            model=MODEL, version=version, replica=replica, shard=0, agent=replica, root=ROOT, at_seq=self.last_seq
        )
        return msgspec.structs.replace(demand, **rest)

    async def ask(self, demand: PlanRequest) -> PlanAnswer | QueryError:
        """Ask until the planner has folded as far as the question rests on: it says so where a busy machine is late.

        And until there is an answer, as agents do: a busy planner drops what it takes up too late.
        """

        async def answer() -> PlanAnswer | QueryError:
            subject = subjects.query_subject(self.name, "plan")
            body = await self.bus.request(subject, msgspec.json.encode(demand), ANSWER_S)
            return msgspec.json.decode(body, type=Plan | Refusal | QueryError)

        return await until_answer(
            lambda: retried(answer, NoAnswer),
            lambda found: not (getattr(found, "error", "") == "RegistryUnavailable" and "ask again" in str(found)),
            "the planner has folded so far",
        )

    async def refused(self, demand: PlanRequest, error: str) -> str:
        answer = await self.ask(demand)
        assert isinstance(answer, Refusal), answer
        assert answer.error == error, answer
        return answer.reason

    async def plan(self, replica: str, version: int = 1) -> Plan:
        answer = await self.ask(self.demand(replica, version))
        assert isinstance(answer, Plan), answer
        return answer


def source(replica: str) -> SourceId:
    return SourceId(replica, 1, replica, 0)


async def begun(bus: Bus, job: str) -> Job:
    """Return a job in which `trainer` has published version 1, and `rollout` wants it."""
    made = Job(bus, job)
    await made.open()
    await made.register("trainer")
    await made.register("rollout")
    await made.publish("trainer", 1)
    return made


@pytest.fixture
async def world(bus: Bus, job: str) -> Job:
    return await begun(bus, job)
