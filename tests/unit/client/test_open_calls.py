"""Each call gets its own response, however its submission and its end fall together, and waits no longer than said."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.bounds import WAIT_S
from tests.kit.waiting import until

from tensorhub import NoInstance, Prompt, RegistryUnavailable, Response, RolloutUnavailable, Sampling, TensorHubError
from tensorhub._rollouts.collector import Collector
from tensorhub._rollouts.manager_client import ManagerClient
from tensorhub.aio.open_calls import OpenCall, OpenCalls
from tensorhub.aio.session_line import SessionLine
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.questions import EndedRequest, ReadyAnswer, ReadyQuestion
from tensorhub_common.runtime.supervision import Supervisor


class Rollouts:
    """Rollouts and their manager, in memory: a group is named after the first token of its prompt."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.submissions: list[tuple[list[str], int | None]] = []
        self.is_answered = asyncio.Event()
        """Set: submissions are answered."""
        self.is_answered.set()
        self.cancelled: list[str] = []
        self.done: list[RequestId] = []
        self.why_not: TensorHubError | None = None
        self.instances = 1
        self._ended: list[EndedRequest] = []

    def end(self, group: str) -> RequestId:
        """Let the group's response end."""
        number = len(self._ended)
        request = RequestId(1, number)
        self._ended.append(EndedRequest(request, 2 + number, group, 0, 2, 0, "prompts", 0, "stop", 1))
        return request

    async def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, newest: int | None, timeout_s: float
    ) -> list[str]:
        del sampling, timeout_s
        groups = [f"g{each.token_ids[0]}" for each in prompts]
        self.collector.claim(groups)
        self.submissions.append((groups, newest))
        await self.is_answered.wait()
        if self.why_not is not None:
            raise self.why_not
        return groups

    async def ready(self, question: ReadyQuestion, deadline: float) -> ReadyAnswer:
        del deadline
        await asyncio.sleep(0.001)
        if self.why_not is not None:
            raise self.why_not
        new = tuple(each for each in self._ended if each.ended_seq > question.after)
        return ReadyAnswer(new, is_last=True, instances=self.instances)

    async def read(self, found: list[EndedRequest]) -> list[Response]:
        return [cast("Response", SimpleNamespace(group=each.group, session=None)) for each in found]

    async def cancel(self, groups: Sequence[str]) -> None:
        self.cancelled += groups
        for each in groups:
            self.end(each)

    async def acknowledge(self, requests: tuple[RequestId, ...]) -> None:
        self.done += requests

    @asynccontextmanager
    async def open_calls(self, **more: Any) -> AsyncIterator[OpenCalls[OpenCall]]:
        line = SessionLine(
            "policy",
            Sampling(),
            cast("ManagerClient", self),
            self.collector,
            said=lambda: (1, 1),
            submit=self.submit,
            cancel=self.cancel,
            read=self.read,
            done=self.acknowledge,
            leave=lambda: None,
            leader_s=1,
        )
        work = Supervisor("the test's calls")
        calls = OpenCalls[OpenCall](line, lambda _, request: calls.acknowledge(request), **more)
        calls.start(work)
        try:
            yield calls
        finally:
            await work.close()


def call(first: int, **sampling: Any) -> OpenCall:
    return OpenCall(Prompt([first]), Sampling(**sampling))


async def bounded(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, WAIT_S)


async def test_what_ends_before_its_submission_is_answered_reaches_its_call() -> None:
    rollouts = Rollouts()
    async with rollouts.open_calls() as calls:
        long = asyncio.create_task(calls.response(call(1)))
        await until(lambda: rollouts.submissions)
        rollouts.is_answered.clear()
        early = asyncio.create_task(calls.response(call(2)))
        await until(lambda: len(rollouts.submissions) == 2)
        # The first one's end is waited for meanwhile, and the second one's comes with it.
        request = rollouts.end("g2")
        rollouts.end("g1")
        assert (await bounded(long)).group == "g1"
        rollouts.is_answered.set()
        assert (await bounded(early)).group == "g2"
        await bounded(calls.wait_acknowledged())
        assert request in rollouts.done


async def test_calls_of_one_sampling_go_together_with_the_newest_version_that_is_known() -> None:
    rollouts = Rollouts()
    async with rollouts.open_calls() as calls:
        made = [call(1), call(2), call(3, max_tokens=4), call(4)]
        calls.newest = 7
        for each in made:
            calls.begin(each)
        await until(lambda: len(rollouts.submissions) == 3)
        assert rollouts.submissions == [(["g1", "g2"], 7), (["g3"], 7), (["g4"], 7)]


async def test_a_submission_that_fails_fails_its_own_calls() -> None:
    rollouts = Rollouts()
    async with rollouts.open_calls() as calls:
        rollouts.why_not = RolloutUnavailable("no manager answers")
        with pytest.raises(RolloutUnavailable, match="no manager answers"):
            await bounded(calls.response(call(1)))
        rollouts.why_not = None
        after = asyncio.create_task(calls.response(call(2)))
        # The first is submitted all the same, and its end is no one's.
        lost = rollouts.end("g1")
        rollouts.end("g2")
        assert (await bounded(after)).group == "g2"
        await until(lambda: lost in rollouts.done)


async def test_a_caller_that_leaves_has_its_call_cancelled_and_acknowledged() -> None:
    rollouts = Rollouts()
    async with rollouts.open_calls() as calls:
        asking = asyncio.create_task(calls.response(call(1)))
        await until(lambda: calls.count and rollouts.submissions)
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: rollouts.cancelled == ["g1"] and rollouts.done == [RequestId(1, 0)])
        await bounded(calls.wait_none())


async def test_a_caller_that_leaves_in_the_turn_of_its_end_leaves_nothing_that_comes_again() -> None:
    rollouts = Rollouts()
    async with rollouts.open_calls() as calls:
        asked = call(1)
        asking = asyncio.create_task(calls.response(asked))
        await until(lambda: asked.group)
        request = rollouts.end("g1")
        await bounded(asked.news.wait())
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: rollouts.done == [request])
        assert not rollouts.cancelled


@pytest.mark.parametrize(("instances", "kind"), [(0, NoInstance), (1, RolloutUnavailable)])
async def test_calls_fail_where_none_has_ended_for_so_long(instances: int, kind: type[TensorHubError]) -> None:
    rollouts = Rollouts()
    rollouts.instances = instances
    async with rollouts.open_calls(silence_s=0.05) as calls:
        with pytest.raises(kind, match=r"nothing was ready after 0.05 s"):
            await bounded(calls.response(call(1)))
        # What it had is acknowledged where it comes all the same.
        late = rollouts.end("g1")
        await until(lambda: rollouts.done == [late])


async def test_calls_fail_too_where_their_ends_can_not_be_had_for_so_long() -> None:
    rollouts = Rollouts()
    async with rollouts.open_calls(silence_s=0.05) as calls:
        asked = call(1)
        asking = asyncio.create_task(calls.response(asked))
        await until(lambda: asked.group)
        rollouts.why_not = RegistryUnavailable("the log can't be read")
        with pytest.raises(RegistryUnavailable, match="the log can't be read"):
            await bounded(asking)


async def test_an_attachment_that_is_over_fails_all_that_are_under_way() -> None:
    rollouts = Rollouts()
    async with rollouts.open_calls() as calls:
        asked = call(1)
        asking = asyncio.create_task(calls.response(asked))
        await until(lambda: asked.group)
        rollouts.why_not = RolloutUnavailable("another trainer has attached")
        with pytest.raises(RolloutUnavailable, match="another trainer has attached"):
            await bounded(asking)
