"""What verl takes for a server that generates: a Ray actor that has the job's runners generate.

Always true: a request comes to its end once, on versions that the rule of the rollouts allows; one that was asked for
after an update begins on that version or a newer one, `staleness` versions before it at most.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from verl.workers.rollout.replica import TokenOutput

import tensorhub
from tensorhub import NotInThisVersion, Prompt, Response, Sampling, TensorHubError
from tensorhub._rollouts.prompts import checked_prompts
from tensorhub.integrations.verl.checkpoint_engine import published_after
from tensorhub_common.runtime.supervision import Fault, Supervisor

SUBMITTED_TOGETHER_MAX: Final = 256
"""Limit of the requests of one submission."""
STEPS_KEPT_MAX: Final = 4096
"""Limit of the versions whose training step is remembered, the latest."""

SAMPLING: Final = {"temperature", "top_p", "top_k", "logprobs", "max_tokens", "max_new_tokens", "stop_token_ids"}
"""What verl's sampling parameters may name."""
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_p": (None, 0.0),
    "min_tokens": (None, 0),
    "ignore_eos": (False,),
    "stop": (None, [], ""),
    "n": (1,),
}
"""What runners can't follow, with the values that ask for nothing."""


@dataclass(frozen=True)
class ServerSettings:
    """What a server is made with."""

    model: str
    """The model's name in the hub."""
    job: str | None
    agent: str | None
    name: str
    """The consumer's name. One server at a time has it."""
    sampling: Sampling
    """What holds where a request says nothing else. `max_tokens` is the limit of a response."""
    prompt_tokens: int
    """Tokens for which a prompt has room. A longer one takes from what is left for the response."""
    staleness: int = 0
    on_update: Any = "continue"
    wait_s: float = 3600
    """So long nothing may come while requests are open, in seconds."""
    update_s: float = 600
    """The bound in seconds of an update, from its beginning to the publication."""


class _Request:
    """One request that is under way."""

    def __init__(self, prompt: Prompt, sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def end(self, made: Response) -> None:
        if not self.answer.done():
            self.answer.set_result(made)

    def fail(self, why: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(why)


class RolloutServer:
    """The actor. verl's clients call `generate`, its checkpoint manager the rest."""

    def __init__(self, settings: ServerSettings) -> None:
        """Prepare; `start` connects."""
        self._settings = settings
        self._work = Supervisor("verl's requests", on_fault=self._failed)
        self._hub: tensorhub.AsyncHub | None = None
        self._rollouts: tensorhub.AsyncRollouts | None = None
        self._waiting: deque[_Request] = deque()
        self._has_waiting = asyncio.Event()
        self._submitting: list[_Request] = []
        """Those of the submission that is under way."""
        self._early: dict[str, Response] = {}
        """By group, what came before that submission had said which groups are its own."""
        self._open: dict[str, _Request] = {}
        """By group, what is submitted."""
        self._has_open = asyncio.Event()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._refuses = False
        self._fault: TensorHubError | None = None
        self._after: int | None = None
        self._newest: int | None = None
        """The version of the last update."""
        self._steps: dict[int, int] = {}
        """The training step of each version, in their order."""

    async def start(self) -> None:
        """Connect and attach. Raises what `connect_async` and `AsyncHub.rollouts` raise."""
        asked = self._settings
        self._hub = await tensorhub.connect_async(asked.job, agent=asked.agent)
        # A trainer that starts again begins with a higher epoch, which drops what the one before has left.
        self._rollouts = await self._hub.rollouts(
            asked.model,
            name=asked.name,
            epoch=int(time.time()),
            group_size=1,
            staleness=asked.staleness,
            on_update=asked.on_update,
            sampling=asked.sampling,
        )
        self._work.start(self._submit_always(self._rollouts), "submitting requests")
        self._work.start(self._take_always(self._rollouts), "taking responses")

    async def close(self) -> None:
        """Detach and end the connection."""
        await self._work.close()
        self._fail_all(TensorHubError("verl's rollout server was closed"))
        if self._rollouts is not None:
            await self._rollouts.close()
        if self._hub is not None:
            await self._hub.close()

    # ------------------------------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str = "",
        **more: Any,  # noqa: ANN401 (what verl gives besides)
    ) -> TokenOutput:
        """Have a response generated, and return it as verl's `TokenOutput`.

        Its `extra_fields` have the training steps of the first and last version that made it (`min_global_steps`,
        `max_global_steps`), those of each token (`token_global_steps`), and the versions (`token_versions`).

        Raises:
            NotInThisVersion: The request asks for what runners can't follow.
            BadPrompt: The prompt is not possible, or leaves no room.
            TensorHubError: The response could not be made; the message says why.
        """
        _check_more(more)
        ids = [int(each) for each in prompt_ids]
        request = _Request(Prompt(ids), self._sampling(len(ids), sampling_params))
        # Here, since a submission has the requests of others too.
        list(checked_prompts([request.prompt]))
        if not await self._admitted():
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=self._steps_of([]))
        if self._fault is not None:
            raise self._fault
        self._waiting.append(request)
        self._has_waiting.set()
        made = await request.answer
        if made.finish_reason not in ("stop", "length"):
            raise TensorHubError(f"request {request_id} of {len(ids)} tokens {_why_not(made)}")
        return TokenOutput(
            token_ids=made.token_ids.tolist(),
            log_probs=made.logprobs.tolist() if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=len({(run.instance, run.attempt) for run in made.runs}) - 1,
            extra_fields=self._steps_of(made.versions.tolist()),
        )

    async def _admitted(self) -> bool:
        """Wait while an update is under way; False: the request is to go elsewhere. Raises `TensorHubError`."""
        try:
            async with asyncio.timeout(self._settings.update_s):
                while not self._may_begin.is_set() and not self._refuses:
                    await self._may_begin.wait()
        except TimeoutError:
            raise TensorHubError(
                f"verl has let no request begin for {self._settings.update_s:g} s: look at what its update waits for, "
                "or allow more with timeout_s"
            ) from None
        return self._may_begin.is_set()

    def _sampling(self, prompt_tokens: int, params: dict[str, Any]) -> Sampling:
        """Return how a request draws its tokens, as verl's own servers read the same parameters."""
        for name, value in params.items():
            if name not in SAMPLING and value not in NEUTRAL.get(name, ()):
                raise NotInThisVersion(f"{name}={value!r:.80} can't be followed by runners: leave it out")
        base, room = self._settings.sampling, self._settings.prompt_tokens
        limit = params.get("max_tokens", params.get("max_new_tokens"))
        if limit is None:
            limit = min(base.max_tokens, room + base.max_tokens - prompt_tokens)
        given = {name: params[name] for name in ("temperature", "top_p") if name in params}
        stops = (*base.stop_token_ids, *(params.get("stop_token_ids") or ()))
        # Below zero verl means no limit.
        top_k = max(0, int(params.get("top_k", base.top_k)))
        sampling = replace(
            base, **given, top_k=top_k, max_tokens=int(limit), stop_token_ids=tuple(dict.fromkeys(stops))
        )
        sampling.checked()
        return sampling

    def _steps_of(self, versions: list[int]) -> dict[str, Any]:
        steps = [self._steps.get(each) for each in versions]
        latest = next(reversed(self._steps.values()), None)
        return {
            "global_steps": steps[-1] if steps else latest,
            "min_global_steps": steps[0] if steps else latest,
            "max_global_steps": steps[-1] if steps else latest,
            "token_global_steps": steps,
            "token_versions": versions,
        }

    # ------------------------------------------------------------------------------------------ loops

    async def _submit_always(self, rollouts: tensorhub.AsyncRollouts) -> NoReturn:
        """Submit what waits: what comes while one submission is under way goes with the next."""
        while True:
            await self._has_waiting.wait()
            requests = self._submitting = self._next_waiting()
            if not requests:
                self._has_waiting.clear()
                continue
            try:
                prompts = [each.prompt for each in requests]
                groups = await rollouts.submit(prompts, sampling=requests[0].sampling, newest=self._newest)
            except TensorHubError as why:
                for each in requests:
                    each.fail(why)
            else:
                for group, each in zip(groups, requests, strict=True):
                    if group in self._early:
                        each.end(self._early[group])
                    else:
                        self._open[group] = each
                self._has_open.set()
            self._submitting = []
            self._early.clear()

    def _next_waiting(self) -> list[_Request]:
        """Take the first ones that wait, of one sampling."""
        found: list[_Request] = []
        while self._waiting and len(found) < SUBMITTED_TOGETHER_MAX:
            if found and self._waiting[0].sampling != found[0].sampling:
                break
            request = self._waiting.popleft()
            if not request.answer.done():
                found.append(request)
        return found

    async def _take_always(self, rollouts: tensorhub.AsyncRollouts) -> NoReturn:
        while True:
            await self._has_open.wait()
            try:
                await self._take_open(rollouts)
            except TensorHubError as why:
                # What is submitted meanwhile has waited for nothing yet, and may wait for a next instance.
                given_up = self._open
                self._open = {}
                for request in given_up.values():
                    request.fail(why)
            if not self._open:
                self._has_open.clear()

    async def _take_open(self, rollouts: tensorhub.AsyncRollouts) -> None:
        async for batch in rollouts.batches(1, wait_s=self._settings.wait_s):
            for each in batch.responses:
                request = self._open.pop(each.group, None)
                if request is not None:
                    request.end(each)
                elif self._submitting:
                    self._early[each.group] = each
            await batch.done()

    def _failed(self, fault: Fault) -> None:
        self._fault = TensorHubError(f"verl's rollout server has failed: {fault}")
        self._fail_all(self._fault)

    def _fail_all(self, why: TensorHubError) -> None:
        for each in (*self._waiting, *self._submitting, *self._open.values()):
            each.fail(why)
        self._waiting.clear()
        self._open.clear()

    # ------------------------------------------------------------------------------------------ updates

    async def execute_checkpoint_engine(self, method: str, **given: Any) -> dict[str, Any] | None:  # noqa: ANN401 (verl's)
        """Take part in an update as a rollout worker does, without weights of its own: runners read these."""
        if method == "prepare":
            return {"after": None, "job": self._connected().job}
        if method == "init_process_group":
            self._after = given["after"]
        return None

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Wait until this update's version is published: what is asked for from then on begins on it.

        Raises:
            TensorHubError: No update was begun, or its version did not come within the bound.
        """
        if self._after is None:
            raise TensorHubError("no update was begun: prepare, build_topology and init_process_group come before it")
        after, self._after = self._after, None
        try:
            async with asyncio.timeout(self._settings.update_s):
                version = await published_after(self._connected(), self._settings.model, after)
        except TimeoutError:
            raise TensorHubError(
                f"no version after {after} of {self._settings.model} came within {self._settings.update_s:g} s: look "
                "at rank 0 of the actor, or allow more with timeout_s"
            ) from None
        self._newest = version
        if global_steps is not None:
            self._steps[version] = int(global_steps)
            if len(self._steps) > STEPS_KEPT_MAX:
                del self._steps[next(iter(self._steps))]

    async def abort_all_requests(self, *, reject_request: bool = False) -> None:
        """Let no further request begin until `resume_generation`: what comes meanwhile waits, or is told `aborted`.

        What is under way goes on. A version does not end a response here: its runner takes it on to the next one, or
        ends it on its own, as `on_update` says.
        """
        self._refuses = bool(reject_request)
        waked, self._may_begin = self._may_begin, asyncio.Event()
        waked.set()

    async def resume_generation(self) -> None:
        """Let requests begin."""
        self._refuses = False
        self._may_begin.set()

    def _connected(self) -> tensorhub.AsyncHub:
        if self._hub is None:
            raise TensorHubError("verl's rollout server was not started")
        return self._hub


def _check_more(more: dict[str, Any]) -> None:
    for name, value in more.items():
        if name != "priority" and value not in (None, [], {}):
            raise NotInThisVersion(f"{name} can't be followed by runners: they take tokens alone")


def _why_not(made: Response) -> str:
    if made.finish_reason == "cancelled":
        return "was cancelled, by hand or by a trainer with a higher epoch"
    return f"could not be made: {made.error}"
