"""A trainer's rollouts: prompts in, finished responses out. `AsyncHub.rollouts` makes them.

Always true: what `submit` returned for is generated to its end, whatever is killed; a response is yielded at most once
by one object, and comes again to the next one of its name until its batch is done.
"""

import asyncio
import importlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec

from tensorhub import arguments
from tensorhub._agent.call_spans import Tracing
from tensorhub._control.registry_client import RegistryClient
from tensorhub._rollouts import records
from tensorhub._rollouts.collector import Collector, Place, Ready
from tensorhub._rollouts.manager_client import ManagerClient
from tensorhub._rollouts.prompts import ID_CHARS_MAX, TOKENS_MAX, Prompt, Sampling, checked_prompts, checked_sampling
from tensorhub._rollouts.responses import Response, Staleness, response_of, staleness_of
from tensorhub._rollouts.trajectories import EndedSession
from tensorhub.aio.lifetime import NotCopyable
from tensorhub.aio.seeding import Seeding, SeedingClock, SeedingTrainer
from tensorhub.aio.session_line import LEADER_S, SessionLine, nothing_ready
from tensorhub_common.errors import AgentUnavailable, BadCommand, RolloutUnavailable, TensorHubError
from tensorhub_common.observability.trace_context import AttributeValue, TraceContext
from tensorhub_common.protocol.log.commands import VERSION_MAX
from tensorhub_common.protocol.rollout import messages
from tensorhub_common.protocol.rollout.entries import (
    ENTRY_BYTES_MAX,
    PRIORITY_MAX,
    Attach,
    Cancel,
    Done,
    GroupSubmitted,
    Payload,
    PolicyName,
    RequestId,
    SdkEntry,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import OnUpdate, VersionRule
from tensorhub_common.protocol.rollout.payloads import (
    StoredTokens,
    SubmittedPrompt,
    SubmittedPrompts,
    decode_prompts,
    decode_tokens,
    encode_prompts,
    group_digest,
)
from tensorhub_common.protocol.rollout.questions import (
    READY_GROUPS_MAX,
    WAIT_S_MAX,
    WHY_INDEX_MAX,
    EndedRequest,
    OutcomeAnswer,
    OutcomeQuestion,
    ReadyAnswer,
    ReadyQuestion,
    RolloutStatus,
    WhyAnswer,
    WhyQuestion,
)
from tensorhub_common.protocol.spans import SUBMIT

if TYPE_CHECKING:
    from tensorhub.aio.shard import AsyncShard
    from tensorhub_common.jetstream.payload_store import PayloadStore

SUBMIT_S: Final = 60.0
ATTACH_S: Final = 30.0
GROUPS_MAX: Final = 1024
"""Limit of the groups of one entry; a call with more makes several."""
GROUP_SIZE_MAX: Final = 1024
ENTRY_PROMPTS_BYTES_MAX: Final = 16 * 1024 * 1024
"""Limit of the prompts of one entry, but for one prompt that is longer by itself."""
ENTRY_GROUPS_BYTES_MAX: Final = ENTRY_BYTES_MAX - 4096
"""Limit of what an entry says of its groups; the rest of it is shorter than what is left."""
DONE_MAX: Final = 8192
"""Limit of the responses that one entry acknowledges."""
PROMPTS_KEPT_MAX: Final = 64
"""Limit of the submissions whose prompts are kept for their responses, the latest used."""

OWN_ID_BYTES_MAX: Final = 48
"""Limit of an id that the SDK makes, of three numbers, in an entry."""

READY_GRACE_S: Final = 0.5

_GATEWAY: Final = "tensorhub_gateway.app.gateway"


class AsyncBatch:
    """Some finished responses."""

    def __init__(
        self, rollouts: "AsyncRollouts", requests: tuple[RequestId, ...], responses: tuple[Response, ...]
    ) -> None:
        self.responses = responses
        """In groups, each in the order in which its responses ended."""
        self._rollouts, self._requests = rollouts, requests

    @property
    def staleness(self) -> Staleness:
        """How many tokens, responses and groups of it are how many versions old."""
        return staleness_of(self.responses)

    async def save(self, path: str | PathLike[str], responses: Iterable[Response] | None = None) -> None:
        """Append the responses to a file, one JSON object a line: `tensorhub replay` scores them again.

        A line has all that made a response but the weights, and not its prompt's metadata. A trajectory has a line for
        each call that is trained in it. The versions that made it
        must still be in the hub when it is replayed (`hub.retain`, `hub.pin`). Save before `done`: a trainer that is
        killed between the two gets the responses again, and their lines may be there twice.

        Examples:
            >>> await batch.save("rollouts.jsonl")

        Args:
            path: The file; it is made if there is none.
            responses: Some of the batch; None: all.

        Raises:
            OSError: The file can't be written.
        """
        job, model = self._rollouts.job, self._rollouts.model
        chosen = self.responses if responses is None else tuple(responses)
        found = [records.record_of(job, model, made) for each in chosen for made in _generated(each)]
        await asyncio.to_thread(records.append, Path(path), found)

    async def done(self, *, timeout_s: float = SUBMIT_S) -> None:
        """Acknowledge the responses: they don't come again. A second call does nothing.

        Args:
            timeout_s: The bound in seconds.

        Raises:
            RolloutUnavailable: No manager answered within the bound, or another trainer has attached since.
        """
        requests, self._requests = self._requests, ()
        try:
            await self._rollouts._done(requests, timeout_s)  # noqa: SLF001 (a batch is a part of its rollouts)
        except BaseException:
            self._requests = requests
            raise


class AsyncRollouts(NotCopyable):
    """One consumer of a job's rollouts; `AsyncHub.rollouts` attaches it."""

    def __init__(
        self,
        registry: RegistryClient,
        tracing: Tracing,
        model: str,
        *,
        name: str,
        epoch: int,
        group_size: int,
        staleness: int,
        age_max: int | None,
        on_update: OnUpdate,
        policy: PolicyName,
        sampling: Sampling,
        shards: "Callable[[], Iterable[AsyncShard]]",
    ) -> None:
        self.model, self.name, self.epoch = model, name, _whole("epoch", epoch, 0, 2**53)
        _one_of("policy", policy, get_args(PolicyName))
        _one_of("on_update", on_update, get_args(OnUpdate))
        checked_sampling(sampling)
        self._manager = ManagerClient(registry)
        self._registry, self._tracing = registry, tracing
        self._group_size = _whole("group_size", group_size, 1, GROUP_SIZE_MAX)
        self._rule = VersionRule(None, _whole("staleness", staleness, 0, 2**31), on_update)
        self._policy = policy
        self._age_max = None if age_max is None else _whole("max_age", age_max, 0, 2**31)
        self._sampling = sampling
        self._collector = Collector()
        self._attachment = self._n = self._seq = 0
        self._not_done = 0
        """How many responses were yielded and are not done."""
        self._saying = asyncio.Lock()
        self._store: PayloadStore | None = None
        self._prompts: OrderedDict[str, SubmittedPrompts] = OrderedDict()
        self._published: tuple[int, ...] = ()
        """The versions that are published, as far as is known here."""
        self._newest: int | None = None
        """The newest of them; it is told more often than all of them."""
        self._is_closed = False
        self._shards = shards
        self._clock = SeedingClock()
        self._sessions: SessionLine | None = None
        """The line that is open, of a gateway or another that takes responses one by one."""

    def __repr__(self) -> str:
        return f"<rollouts {self.name!r} of {self.model!r} in job {self._manager.job!r}, epoch {self.epoch}>"

    @property
    def job(self) -> str:
        """The job."""
        return self._manager.job

    async def _attach(self, timeout_s: float) -> None:
        """Take the consumer's name. Raises `RolloutUnavailable` for an epoch that is over."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        nonce = secrets.token_hex(8)
        attach = Attach(self.name, self.model, self.epoch, nonce, self._policy)
        self._attachment = self._seq = await self._manager.append(attach, f"attach-{nonce}", deadline)
        self._newest = (await self._manager.outcome(OutcomeQuestion(self._seq), deadline)).newest

    # ------------------------------------------------------------------------------------------ submitting

    async def submit(
        self,
        prompts: Iterable[Prompt],
        *,
        version: int | None = None,
        sampling: Sampling | None = None,
        group_size: int | None = None,
        priority: int = 0,
        newest: int | None = None,
        timeout_s: float = SUBMIT_S,
    ) -> list[str]:
        """Have responses generated: `group_size` of each prompt. Return the ids of the groups.

        Once it returns, every response comes to its end, whatever is killed.

        Examples:
            >>> groups = await rollouts.submit([tensorhub.Prompt([1, 5, 9], id="p-17")])

        Args:
            prompts: What to go on from.
            version: The one version that the tokens must be made on; None: the rule of these rollouts.
            sampling: How tokens are drawn; None: the sampling of these rollouts.
            group_size: Responses of each prompt; None: the size of these rollouts.
            priority: Higher ones begin first.
            newest: A version that another process has published a moment ago: with `staleness=0` no response begins
                on one before it. What this process has published counts without that.
            timeout_s: The bound in seconds.

        Raises:
            BadPrompt: A prompt or a sampling is not possible, or an id stands for another prompt.
            RolloutUnavailable: No manager answered within the bound. The prompts may be submitted all the same: those
                with an id may be submitted again.
        """
        self._check_open()
        size = _whole("group_size", self._group_size if group_size is None else group_size, 1, GROUP_SIZE_MAX)
        order = _whole("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
        pinned = None if version is None else _whole("version", version, 0, VERSION_MAX)
        known = None if newest is None else _whole("newest", newest, 0, VERSION_MAX)
        drawn = checked_sampling(self._sampling if sampling is None else sampling)
        deadline = asyncio.get_running_loop().time() + arguments.seconds("timeout_s", timeout_s)
        given = list(checked_prompts(prompts))
        with self._submission(len(given)) as cause:
            return await self._submit(given, size, order, pinned, drawn, deadline, cause, newest=known)

    async def _submit_calls(
        self, calls: Sequence[Prompt], sampling: Sampling, newest: int | None, timeout_s: float
    ) -> list[str]:
        """Submit what a line takes the responses of, one of each prompt. Raises as `submit`."""
        self._check_open()
        deadline = asyncio.get_running_loop().time() + timeout_s
        given, drawn = list(checked_prompts(calls)), checked_sampling(sampling)
        with self._submission(len(given)) as cause:
            return await self._submit(given, 1, 0, None, drawn, deadline, cause, newest=newest, is_claimed=True)

    @contextmanager
    def _submission(self, groups: int) -> Iterator[TraceContext | None]:
        """Trace a submission, and give the span that it names."""
        told: dict[str, AttributeValue] = {
            "tensorhub.model": self.model,
            "tensorhub.consumer": self.name,
            "tensorhub.groups": groups,
        }
        with self._tracing.root(SUBMIT, told) as call:
            yield call.context

    async def _submit(
        self,
        given: list[tuple[Prompt, SubmittedPrompt]],
        size: int,
        order: int,
        pinned: int | None,
        drawn: messages.Sampling,
        deadline: float,
        cause: TraceContext | None,
        *,
        newest: int | None = None,
        is_claimed: bool = False,
    ) -> list[str]:
        """Submit checked prompts, in as many entries as they take, and return the ids of their groups.

        `newest`: what the caller knows to be published. `is_claimed`: a line takes their responses.
        """
        groups: list[str] = []
        while given:
            part = _part(given)
            given = given[len(part) :]
            async with self._saying:
                nonce = f"{self._attachment}.{self._n + 1}"
                self._note_published()
                known = max((each for each in (newest, self._newest) if each is not None), default=None)
                submitted = SubmittedPrompts(
                    drawn, self._rule, tuple(each for _, each in part), nonce, self._age_max, known
                )
                entries = tuple(
                    GroupSubmitted(
                        id=f"_{nonce}.{index}" if prompt.id is None else prompt.id,
                        digest=group_digest(each.tokens, drawn, pinned, size),
                        size=size,
                        prompt_tokens=len(each.tokens) // 4,
                        tokens_max=drawn.tokens_max,
                        priority=order,
                        version=pinned,
                        is_named=prompt.id is not None,
                    )
                    for index, (prompt, each) in enumerate(part)
                )
                data = encode_prompts(submitted)
                payload = Payload(await (await self._payloads()).put(self._manager.job, data), len(data))
                self._keep(payload.digest, submitted)
                if is_claimed:
                    # Before any of them can end.
                    self._collector.claim(each.id for each in entries)
                await self._say(lambda by: Submit(by, entries, payload), deadline, cause)  # noqa: B023 (called at once)
            groups += [each.id for each in entries]
        return groups

    async def cancel(self, groups: str | Iterable[str], *, timeout_s: float = SUBMIT_S) -> None:
        """End what is open of these groups: their responses come as `cancelled`, with no tokens.

        Args:
            groups: One id, or several.
            timeout_s: The bound in seconds.

        Raises:
            BadCommand: A group was never submitted.
            RolloutUnavailable: No manager answered within the bound.
        """
        self._check_open()
        deadline = asyncio.get_running_loop().time() + arguments.seconds("timeout_s", timeout_s)
        for part in _named_parts(_group_ids(groups)):
            async with self._saying:
                await self._say(lambda by: Cancel(by, part), deadline)  # noqa: B023 (called at once)

    # ------------------------------------------------------------------------------------------ taking

    async def batches(
        self,
        min_responses: int = 1,
        *,
        whole_groups: bool = True,
        wait_s: float = 600,
        groups: str | Iterable[str] | None = None,
    ) -> AsyncGenerator[AsyncBatch, None]:
        """Yield batches of finished responses, each as soon as enough are finished, until nothing is open.

        Several tasks may take batches at a time: a response comes to one of them. One that could not be read, or was
        broken off meanwhile, comes again to the next.

        Examples:
            >>> async for batch in rollouts.batches(min_responses=64):
            ...     train(batch.responses)
            ...     await batch.done()

        Args:
            min_responses: A batch has at least so many; the last one may have fewer.
            whole_groups: A batch has all responses of a group, or none.
            wait_s: So long a batch is waited for; then what is ready is yielded. 0: what is ready now.
            groups: Of these groups alone, until none of them is open.

        Raises:
            BadCommand: The finished responses fill the job's payloads, and are fewer than `min_responses`: no other
                begins until some are done.
            NoInstance: Nothing was ready after `wait_s`, and no instance generates.
            RolloutUnavailable: Nothing was ready after `wait_s`, or another trainer has attached since.
        """
        _whole("min_responses", min_responses, 1, 2**31)
        bound_s = arguments.seconds("wait_s", wait_s)
        is_whole = arguments.flag("whole_groups", whole_groups)
        wanted = None if groups is None else dict.fromkeys(_group_ids(groups))
        while True:
            picked = await self._pick(min_responses, whole_groups=is_whole, groups=wanted, wait_s=bound_s)
            if not picked:
                return
            try:
                batch = await self._batch(picked)
            except BaseException:
                self._collector.put_back(picked)
                raise
            yield batch

    async def _pick(
        self, count_min: int, *, whole_groups: bool, groups: Collection[str] | None, wait_s: float
    ) -> list[Ready]:
        """Return at least so many responses, or what is ready at the end of the wait, or of all; none: nothing is open.

        Raises as `batches`.
        """
        began_at = asyncio.get_running_loop().time()
        try:
            return await self._until_picked(count_min, whole_groups=whole_groups, groups=groups, wait_s=wait_s)
        finally:
            self._clock.train_wait_s += asyncio.get_running_loop().time() - began_at

    async def _until_picked(
        self, count_min: int, *, whole_groups: bool, groups: Collection[str] | None, wait_s: float
    ) -> list[Ready]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        collector = self._collector
        # Of all that is wanted one question asks for a part; what it found closed needs no other question.
        parts = [None] if groups is None else [*_parts(tuple(groups), READY_GROUPS_MAX)]
        left = parts
        asked_of, answer = -1, ReadyAnswer()
        while True:
            self._check_open()
            sessions = self._sessions
            # Of before what is looked at: what is delivered behind that sets it.
            delivered = None if sessions is None else sessions.delivered
            picked = collector.pick(count_min, whole_groups=whole_groups, groups=groups, all_of_them=False)
            if picked:
                return picked
            if asked_of != self._seq:
                # What this trainer has said since the last answer may have opened something.
                left = parts
            if not left and (sessions is None or not sessions.may_come(groups)):
                return collector.pick(0, whole_groups=whole_groups, groups=groups, all_of_them=True)
            if asked_of == self._seq:
                self._check_room(count_min, answer)
            left_s = deadline - loop.time()
            # Who does not wait is told what is ready all the same.
            if left_s <= 0 and asked_of >= 0:
                picked = collector.pick(0, whole_groups=whole_groups, groups=groups, all_of_them=True)
                if picked:
                    return picked
                raise self._nothing_ready(wait_s, answer)
            if delivered is not None and not left:
                # A session begins or ends here, and the manager knows nothing of it.
                await _wait(delivered, min(left_s, WAIT_S_MAX))
                left = parts
                continue
            question = ReadyQuestion(
                self._attachment,
                self._seq,
                *collector.place,
                wait_s=max(0.0, min(left_s, WAIT_S_MAX)),
                groups=left[0],
            )
            # The answer to a question that waits until the deadline comes a moment after it.
            asked = self._manager.ready(question, max(deadline, loop.time()) + READY_GRACE_S)
            found = await (asked if delivered is None else _unless(delivered, asked))
            if found is not None and self._take(question, found):
                asked_of, answer = question.seq, found
                left = left[1:] if found.is_last and not found.open else left

    def _take(self, question: ReadyQuestion, answer: ReadyAnswer) -> bool:
        """Take an answer; False: another task has taken it."""
        self._published, self._newest = answer.published, max(answer.published, default=None)
        return self._collector.take(Place(question.after, question.after_request), answer)

    def _check_room(self, count_min: int, answer: ReadyAnswer) -> None:
        """Raise `BadCommand` where nothing goes on before some is done. `answer`: the manager's last."""
        count = self._collector.count
        # Another task of this trainer may be about to say that what was yielded is done.
        if answer.is_full and answer.is_last and count and not self._not_done:
            raise BadCommand(
                f"min_responses={count_min} can't be reached: {count} finished responses fill the job's payloads, and "
                "no other begins until some are done: take fewer at a time, or give payloads more room (the runbook "
                "says how)"
            )

    def _nothing_ready(self, wait_s: float, answer: ReadyAnswer) -> TensorHubError:
        """Return why no batch has come within the bound. `answer`: the manager's last."""
        if self._sessions is not None and answer.instances:
            return RolloutUnavailable(
                f"nothing was ready after {wait_s:g} s, and {len(self._sessions.sessions)} sessions of the gateway are "
                "open: one comes once its last reward is posted and its calls have ended"
            )
        if answer.instances and answer.is_full and answer.is_last and self._not_done:
            return RolloutUnavailable(
                f"nothing was ready after {wait_s:g} s: {self._not_done} responses were yielded and are not "
                "done. They fill the job's payloads, and no other begins until some are done: call batch.done()"
            )
        return nothing_ready(self.model, wait_s, has_instances=answer.instances > 0)

    async def _batch(self, picked: list[Ready]) -> AsyncBatch:
        alone = [each for each in picked if isinstance(each, EndedRequest)]
        sessions = [each for each in picked if isinstance(each, EndedSession)]
        responses = await self._read(alone)
        responses += [made for each in sessions for made in each.trajectories]
        requests = (*(each.request for each in alone), *(of for each in sessions for of in each.requests))
        self._not_done += len(requests)
        return AsyncBatch(self, requests, tuple(responses))

    async def _read(self, picked: list[EndedRequest]) -> list[Response]:
        """Read the tokens of responses, each payload once."""
        self._note_published()
        stored: dict[str, tuple[StoredTokens, ...]] = {}
        store, job = await self._payloads(), self._manager.job
        responses = []
        for ended in picked:
            if ended.payload is not None and ended.payload not in stored:
                stored[ended.payload] = decode_tokens(await store.get(job, ended.payload))
            tokens = None if ended.payload is None else stored[ended.payload][ended.index]
            prompts = await self._prompts_of(ended.prompts)
            responses.append(response_of(ended, prompts, tokens, self._published))
        return responses

    async def _done(self, requests: tuple[RequestId, ...], timeout_s: float) -> None:
        self._check_open()
        deadline = asyncio.get_running_loop().time() + arguments.seconds("timeout_s", timeout_s)
        for start in range(0, len(requests), DONE_MAX):
            part = requests[start : start + DONE_MAX]
            async with self._saying:
                await self._say(lambda by: Done(by, part), deadline)  # noqa: B023 (called at once)
        self._not_done -= len(requests)

    # ------------------------------------------------------------------------------------------ sessions

    def gateway(
        self,
        tokenizer: Any,  # noqa: ANN401 (a directory, or a tokenizer of transformers, which the SDK does not import)
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        session_idle_s: float = 3600,
        call_s: float = 600,
    ) -> Any:  # noqa: ANN401 (tensorhub_gateway.app.gateway.Gateway; the SDK depends on no service)
        """Serve agents and tools: an endpoint like OpenAI's, whose sessions `batches()` yields as trajectories.

        A session is what has one `X-TensorHub-Session`; it ends with the reward that is posted to it. While the gateway
        is open `batches()` waits for sessions, and ends by none being there only once it is closed. Needs the extra
        `gateway`. One gateway of these rollouts is open at a time.

        Examples:
            >>> async with rollouts.gateway("./my-model", port=8000) as gateway:
            ...     print("agents call", gateway.url)
            ...     async for batch in rollouts.batches(min_responses=64):
            ...         train(batch.responses)
            ...         await batch.done()

        Args:
            tokenizer: A directory with the model's tokenizer and chat template, or a tokenizer of transformers.
            host: Where it listens. Other machines reach none but an address of this one; give a key with such.
            port: 0: one that is free, see `url`.
            api_key: What clients must send; None: nothing.
            session_idle_s: A session ends without a reward after so long without a call.
            call_s: A call that has not ended after so long is cancelled.

        Raises:
            BadCommand: An argument is not possible, a gateway is open already, or the tokenizer can't be used.
        """
        self._check_open()
        try:
            make = importlib.import_module(_GATEWAY).Gateway
        except ImportError as why:
            raise BadCommand(f"a gateway needs the extra gateway ({why}): pip install 'tensorhub[gateway]'") from None
        return make(
            self._session_line,
            tokenizer,
            host=host,
            port=port,
            api_key=api_key,
            session_idle_s=arguments.seconds("session_idle_s", session_idle_s),
            call_s=arguments.seconds("call_s", call_s),
        )

    def _session_line(self, leader_s: float = LEADER_S) -> SessionLine:
        """Return the line of a gateway that opens, or of another. Raises `BadCommand` where one is open."""
        self._check_open()
        if self._sessions is not None:
            raise BadCommand("these rollouts have a gateway: close it, or attach to another name for a second one")

        def leave() -> None:
            self._sessions = None

        self._sessions = SessionLine(
            self.model,
            self._sampling,
            self._manager,
            self._collector,
            said=lambda: (self._attachment, self._seq),
            submit=self._submit_calls,
            cancel=self.cancel,
            read=self._read,
            done=self._done_of_session,
            leave=leave,
            leader_s=leader_s,
        )
        return self._sessions

    async def _done_of_session(self, requests: tuple[RequestId, ...]) -> None:
        self._not_done += len(requests)
        await self._done(requests, SUBMIT_S)

    # ------------------------------------------------------------------------------------------ seeding

    def seeding(
        self,
        engine: Any,  # noqa: ANN401 (an engine of tensorhub_runner's protocol; the SDK depends on no service)
        *,
        seconds: float | None = None,
        initial_s: float = 150.0,
        gain: float = 3.0,
        timeout_s: float = 30,
    ) -> Seeding:
        """Have the trainer's own engine generate at the beginning of a step, as one more instance (RLBoost).

        Its weights are the version that this process has published, and must not change within the block. The block
        ends after `seconds`, or as soon as the engine has nothing to do. What it has begun goes on elsewhere, behind
        its last token. So the trainer's GPUs work until the first batch is worth training on.

        How long is learnt from step to step (NSDI'26, Algorithm 1): longer where the trainer waited in `batches()`,
        shorter where the last remote token had long come when the next version was published.

        Examples:
            >>> await rollouts.submit(prompts)
            >>> async with rollouts.seeding(engine):
            ...     pass
            >>> async for batch in rollouts.batches(min_responses=64):
            ...     train(batch.responses)

        Args:
            engine: An engine over the trainer's model, such as `tensorhub_runner.engines.torch_engine.TorchEngine`.
                Between two seedings it is the trainer's.
            seconds: So long at most; None: what was learnt.
            initial_s: What is taken for the first step.
            gain: The higher, the slower it learns.
            timeout_s: The bound in seconds of beginning.

        Raises:
            NotPublished: This process has registered no shard of the model that holds a version.
            BadCommand: `engine` is none, or another one seeds already.
            RolloutUnavailable: No manager answered within the bound, or another trainer has attached since.
        """
        self._check_open()
        trainer = SeedingTrainer(self._manager, self._registry, self.model, self._attachment, self._local_version())
        return Seeding(
            trainer, self._clock, engine, seconds=seconds, initial_s=initial_s, gain=gain, timeout_s=timeout_s
        )

    def _local_version(self) -> int | None:
        """Return the version that a shard of this process holds."""
        held = (each.version for each in self._shards() if each.model == self.model)
        return next((version for version in held if version is not None), None)

    def _note_published(self) -> None:
        """Count what this process has published since the manager's last answer."""
        local = self._local_version()
        if local is not None and local > max(self._published, default=-1):
            self._published = (*self._published, local)
        self._newest = max((each for each in (local, self._newest) if each is not None), default=None)

    # ------------------------------------------------------------------------------------------ the rest

    async def status(self, *, timeout_s: float = 5) -> RolloutStatus:
        """Return the job's rollouts: consumers, instances, queue.

        Args:
            timeout_s: The bound in seconds.

        Raises:
            RolloutUnavailable: No manager answered within the bound.
        """
        self._check_open()
        deadline = asyncio.get_running_loop().time() + arguments.seconds("timeout_s", timeout_s)
        return await self._manager.ask("status", None, RolloutStatus, deadline)

    async def why(self, group: str, index: int | None = None, *, timeout_s: float = 5) -> WhyAnswer:
        """Return what a group's responses wait for, how long they are expected to be, and why each is where it is.

        Groups of this name of the job's other consumers are told too. Of what is done nothing is known any more.

        Examples:
            >>> (response,) = (await rollouts.why("p-17", 3)).requests
            >>> print(response.state, response.waits_for, [each.reason for each in response.attempts])

        Args:
            group: Its id, as `submit` returned it.
            index: One response of it alone; None: all, the first 64 of them.
            timeout_s: The bound in seconds.

        Raises:
            BadCommand: There is no such group, or no such response in it.
            RolloutUnavailable: No manager answered within the bound.
        """
        self._check_open()
        (name,) = _group_ids((group,))
        number = None if index is None else _whole("index", index, 0, WHY_INDEX_MAX)
        deadline = asyncio.get_running_loop().time() + arguments.seconds("timeout_s", timeout_s)
        return await self._manager.ask("why", WhyQuestion(name, number), WhyAnswer, deadline)

    async def close(self) -> None:
        """Detach. Work goes on; what is not done comes to the next trainer that attaches to the name."""
        self._is_closed = True
        self._collector.drop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise AgentUnavailable("these rollouts are closed: call hub.rollouts() again")
        self._registry.check_open()

    async def _say(
        self, entry_by: Callable[[SdkSender], SdkEntry], deadline: float, cause: TraceContext | None = None
    ) -> OutcomeAnswer:
        """Append the next entry of this attachment and return its outcome. The caller has `_saying`."""
        self._n += 1
        by = SdkSender(self._attachment, self._n)
        seq = await self._manager.append(entry_by(by), f"attachment-{self._attachment}-{self._n}", deadline, cause)
        self._seq = max(self._seq, seq)
        answer = await self._manager.outcome(OutcomeQuestion(seq, self._attachment, by.n), deadline)
        self._newest = answer.newest if answer.newest is not None else self._newest
        return answer

    async def _payloads(self) -> "PayloadStore":
        if self._store is None:
            from tensorhub_common.jetstream.payload_store import PayloadStore  # noqa: PLC0415 (it imports NATS's client)

            self._store = PayloadStore(await self._registry.bus())
        return self._store

    async def _prompts_of(self, digest: str) -> SubmittedPrompts:
        found = self._prompts.get(digest)
        if found is None:
            found = decode_prompts(await (await self._payloads()).get(self._manager.job, digest))
        self._keep(digest, found)
        return found

    def _keep(self, digest: str, prompts: SubmittedPrompts) -> None:
        self._prompts[digest] = prompts
        self._prompts.move_to_end(digest)
        if len(self._prompts) > PROMPTS_KEPT_MAX:
            self._prompts.popitem(last=False)


async def attached(rollouts: AsyncRollouts, timeout_s: float) -> AsyncRollouts:
    """Attach the rollouts to their name and return them."""
    await rollouts._attach(timeout_s)  # noqa: SLF001 (of this file)
    return rollouts


def line_of(rollouts: AsyncRollouts, leader_s: float) -> SessionLine:
    """Return a line that takes the rollouts' responses one by one.

    `leader_s`: so long it waits for a leading manager, in seconds. Raises `BadCommand` where a gateway is open.
    """
    return rollouts._session_line(leader_s)  # noqa: SLF001 (of this file)


async def _wait(event: asyncio.Event, wait_s: float) -> None:
    """Wait until an event is set, for so long at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, ReadyAnswer]) -> ReadyAnswer | None:
    """Return what the work returns; None where the event is set before."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.wait({working, waiting})


def _generated(response: Response) -> Iterator[Response]:
    """Yield the responses that engines generated of this one: itself, or the calls that are trained in it."""
    if response.turns:
        yield from (each.response for each in response.turns if each.is_trained)
    else:
        yield response


def _one_of(what: str, said: object, possible: tuple[str, ...]) -> None:
    if said not in possible:
        raise BadCommand(f"{what}={said!r:.40} is not possible: take one of {', '.join(possible)}")


_GROUP_BYTES: Final = len(
    msgspec.json.encode(
        GroupSubmitted("", "0" * 64, GROUP_SIZE_MAX, TOKENS_MAX, TOKENS_MAX, -PRIORITY_MAX, VERSION_MAX, is_named=False)
    )
)
"""What an entry says of a group beside its id, at most."""


def _part(given: list[tuple[Prompt, SubmittedPrompt]]) -> list[tuple[Prompt, SubmittedPrompt]]:
    """Return the first prompts that fit into one entry, with what it says of their groups."""
    part, nbytes, said_bytes = list[tuple[Prompt, SubmittedPrompt]](), 0, 0
    for prompt, each in given[:GROUPS_MAX]:
        nbytes += len(each.tokens) + len(each.metadata)
        said_bytes += _GROUP_BYTES + _id_bytes("" if prompt.id is None else prompt.id)
        if part and (nbytes > ENTRY_PROMPTS_BYTES_MAX or said_bytes > ENTRY_GROUPS_BYTES_MAX):
            break
        part.append((prompt, each))
    return part


def _group_ids(groups: object) -> tuple[str, ...]:
    """Return the ids of groups. Raises `BadCommand` for what can be none."""
    given = (groups,) if isinstance(groups, str) else groups
    if not isinstance(given, Iterable):
        raise BadCommand(f"groups={arguments.shown(groups)} is not possible: give an id, or a list of them")
    found = tuple(given)
    for each in found:
        if not isinstance(each, str) or len(each) > ID_CHARS_MAX or not each.isprintable():
            raise BadCommand(f"{arguments.shown(each)} is the id of no group: give one that submit() has returned")
    return found


def _named_parts(ids: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield ids, as many as fit into one entry at a time."""
    part, nbytes = list[str](), 0
    for each in ids:
        nbytes += _id_bytes(each)
        if part and (len(part) == GROUPS_MAX or nbytes > ENTRY_GROUPS_BYTES_MAX):
            yield tuple(part)
            part, nbytes = [], _id_bytes(each)
        part.append(each)
    if part:
        yield tuple(part)


def _parts(ids: tuple[str, ...], count: int) -> Iterator[tuple[str, ...]]:
    """Yield so many ids at a time; of none, none of them."""
    for start in range(0, max(1, len(ids)), count):
        yield ids[start : start + count]


def _id_bytes(id_: str) -> int:
    """Return how many bytes an id has in an entry, with quotes and a comma; one that the SDK makes has fewer."""
    return len(msgspec.json.encode(id_)) + 1 if id_ else OWN_ID_BYTES_MAX


def _whole(what: str, number: object, low: int, high: int) -> int:
    """Return a whole number of any library as Python's."""
    try:
        found = arguments.whole(what, number)
    except TypeError:
        found = None
    if found is None or not low <= found <= high:
        raise BadCommand(f"{what}={arguments.shown(number)} is not possible: take a whole number from {low} to {high}")
    return found
