"""The twin of `AsyncRollouts` for programs without an event loop."""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

from tensorhub._rollouts.responses import Response, Staleness
from tensorhub.aio.lifetime import NotCopyable
from tensorhub.aio.rollouts import AsyncBatch, AsyncRollouts
from tensorhub.aio.seeding import Seeding
from tensorhub.sync.blocking import blocking
from tensorhub.sync.loop_thread import LoopThread
from tensorhub_common.errors import TensorHubError


class Batch:
    """Some finished responses."""

    def __init__(self, background: LoopThread, batch: AsyncBatch) -> None:
        self._background = background
        self._twin = batch

    @property
    def responses(self) -> tuple[Response, ...]:
        """In groups, each in the order in which its responses ended."""
        return self._twin.responses

    @property
    def staleness(self) -> Staleness:
        """How many tokens, responses and groups of it are how many versions old."""
        return self._twin.staleness

    save = blocking(AsyncBatch.save)
    """Append the responses to a file, for `tensorhub replay`; see `AsyncBatch.save`."""

    done = blocking(AsyncBatch.done)
    """Acknowledge the responses; see `AsyncBatch.done`."""


class Rollouts(NotCopyable):
    """One consumer of a job's rollouts; `Hub.rollouts` attaches it."""

    def __init__(self, background: LoopThread, rollouts: AsyncRollouts) -> None:
        self._background = background
        self._twin = rollouts

    def __repr__(self) -> str:
        return repr(self._twin)

    @property
    def model(self) -> str:
        """The model whose versions generate."""
        return self._twin.model

    @property
    def job(self) -> str:
        """The job."""
        return self._twin.job

    @property
    def name(self) -> str:
        """The consumer's name."""
        return self._twin.name

    @property
    def epoch(self) -> int:
        """The number of the trainer's history."""
        return self._twin.epoch

    submit = blocking(AsyncRollouts.submit)
    """Have responses generated and return the ids of their groups; see `AsyncRollouts.submit`."""

    cancel = blocking(AsyncRollouts.cancel)
    """End what is open of groups; see `AsyncRollouts.cancel`."""

    status = blocking(AsyncRollouts.status)
    """Return consumers, instances and queue; see `AsyncRollouts.status`."""

    why = blocking(AsyncRollouts.why)
    """Return what a group's responses wait for, and why each was placed where it was; see `AsyncRollouts.why`."""

    close = blocking(AsyncRollouts.close)
    """Detach; see `AsyncRollouts.close`."""

    def batches(
        self,
        min_responses: int = 1,
        *,
        whole_groups: bool = True,
        wait_s: float = 600,
        groups: str | Iterable[str] | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield batches of finished responses, each as soon as enough are finished, until nothing is open.

        Several threads may take batches at a time: a response comes to one of them. One that could not be read, or was
        broken off meanwhile, comes again to the next.

        Examples:
            >>> for batch in rollouts.batches(min_responses=64):
            ...     train(batch.responses)
            ...     batch.done()

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
        found = self._twin.batches(min_responses, whole_groups=whole_groups, wait_s=wait_s, groups=groups)

        async def following() -> AsyncBatch | None:
            return await anext(found, None)

        try:
            while (batch := self._background.run(following())) is not None:
                yield Batch(self._background, batch)
        finally:
            with suppress(TensorHubError):
                self._background.run(found.aclose())

    @contextmanager
    def gateway(
        self,
        tokenizer: Any,  # noqa: ANN401 (as of its twin)
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        session_idle_s: float = 3600,
        call_s: float = 600,
    ) -> Generator[Any, None, None]:
        """Serve agents and tools, whose sessions `batches()` yields as trajectories; see `AsyncRollouts.gateway`.

        Examples:
            >>> with rollouts.gateway("./my-model", port=8000) as gateway:
            ...     print("agents call", gateway.url)
            ...     for batch in rollouts.batches(min_responses=64):
            ...         batch.done()
        """
        run = self._background.run
        gateway = self._twin.gateway(
            tokenizer, host=host, port=port, api_key=api_key, session_idle_s=session_idle_s, call_s=call_s
        )
        run(gateway.__aenter__())
        try:
            yield gateway
        finally:
            run(gateway.__aexit__(None, None, None))

    @contextmanager
    def seeding(
        self,
        engine: Any,  # noqa: ANN401 (as of its twin)
        *,
        seconds: float | None = None,
        initial_s: float = 150.0,
        gain: float = 3.0,
        timeout_s: float = 30,
    ) -> Generator[Seeding, None, None]:
        """Have the trainer's own engine generate at the beginning of a step; see `AsyncRollouts.seeding`.

        Examples:
            >>> rollouts.submit(prompts)
            >>> with rollouts.seeding(engine):
            ...     pass
        """
        run = self._background.run
        seeding = self._twin.seeding(engine, seconds=seconds, initial_s=initial_s, gain=gain, timeout_s=timeout_s)
        run(seeding.__aenter__())
        try:
            yield seeding
        except BaseException:
            run(seeding.__aexit__(*sys.exc_info()))
            raise
        run(seeding.__aexit__(None, None, None))
