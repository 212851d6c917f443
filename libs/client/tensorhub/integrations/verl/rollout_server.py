"""What verl takes for a server that generates: a Ray actor that has the job's runners generate.

Always true: a request comes to its end once, on versions that the rule of the rollouts allows; one that was asked for
after an update begins on that version or a newer one, `staleness` versions before it at most.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from verl.workers.rollout.replica import TokenOutput

import tensorhub
from tensorhub import NotInThisVersion, Prompt, Response, Sampling, TensorHubError
from tensorhub._rollouts.prompts import checked_prompts
from tensorhub.aio.open_calls import OpenCall, OpenCalls
from tensorhub.aio.rollouts import line_of
from tensorhub.integrations.verl.checkpoint_engine import published_after
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.runtime.supervision import Fault, Supervisor

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
NOT_STARTED: Final = "verl's rollout server was not started"


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


class RolloutServer:
    """The actor. verl's clients call `generate`, its checkpoint manager the rest."""

    def __init__(self, settings: ServerSettings) -> None:
        """Prepare; `start` connects."""
        self._settings = settings
        self._work = Supervisor("verl's requests", on_fault=self._failed)
        self._hub: tensorhub.AsyncHub | None = None
        self._rollouts: tensorhub.AsyncRollouts | None = None
        self._calls: OpenCalls[OpenCall] | None = None
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._refuses = False
        self._fault: TensorHubError | None = None
        self._after: int | None = None
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
        line = line_of(self._rollouts, asked.wait_s)
        self._calls = OpenCalls(line, self._drop, silence_s=asked.wait_s)
        self._calls.start(self._work)

    async def close(self) -> None:
        """Detach and end the connection."""
        await self._work.close()
        self._fault = TensorHubError("verl's rollout server was closed")
        if self._calls is not None:
            self._calls.fail_all(self._fault)
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
        call = OpenCall(Prompt(ids), self._sampling(len(ids), sampling_params))
        # Here, since a submission has the requests of others too.
        list(checked_prompts([call.prompt]))
        if not await self._admitted():
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=self._steps_of([]))
        if self._fault is not None:
            raise self._fault
        made = await self._open_calls().response(call)
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

    def _drop(self, session: str | None, request: RequestId) -> None:
        """Take what has ended and nothing here waits for: it does not come again."""
        del session
        self._open_calls().acknowledge(request)

    def _failed(self, fault: Fault) -> None:
        self._fault = TensorHubError(f"verl's rollout server has failed: {fault}")
        self._open_calls().fail_all(self._fault)

    def _open_calls(self) -> OpenCalls[OpenCall]:
        if self._calls is None:
            raise TensorHubError(NOT_STARTED)
        return self._calls

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
        self._open_calls().newest = version
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
            raise TensorHubError(NOT_STARTED)
        return self._hub


def _check_more(more: dict[str, Any]) -> None:
    for name, value in more.items():
        if name != "priority" and value not in (None, [], {}):
            raise NotInThisVersion(f"{name} can't be followed by runners: they take tokens alone")


def _why_not(made: Response) -> str:
    if made.finish_reason == "cancelled":
        return "was cancelled, by hand or by a trainer with a higher epoch"
    return f"could not be made: {made.error}"
