"""The memory that one read writes: taken from its readers, filled, and then a version or a part of one. Pure.

A shard that swaps is filled beside what it holds, which is served until all of its replica swaps. Always true: nothing
may be written before the last lease on the memory has ended or was broken and a probe has found no process that maps
it; and others may read what was filled only once the log counts it.
"""

from tensorhub_agent.core.effects import EffectOutcome, Keep, Kept
from tensorhub_agent.core.operations.reclaim import MemoryChoice, MemoryReclaim
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.protocol.log.events import ShardFilled


class ReadTarget:
    """Where one read writes. What returns a bool says whether the memory may be written from now on."""

    def __init__(self, core: ShardCore) -> None:
        """Leave what stands there as it is, until `vacate`."""
        self._core = core
        self._reclaim: MemoryReclaim | None = None
        """While the memory that is to be written may be mapped by somebody."""
        self._vacated = False
        """The log has let go of what stands here, to have it overwritten, and nothing has been written yet."""
        self._drain_until = 0.0
        self._keeping: int | None = None
        """Which question has not been answered, whether the manifest says what was filled."""
        self._beside: tuple[int, str] | None = None
        """What stands whole in the spare memory of a staged shard: the version, and its root."""

    # Taken from its readers.

    def vacate(self, now: float) -> bool:
        """Stop serving what is to be overwritten."""
        core = self._core
        if core.spec.swaps:
            # The bytes go to the spare memory, and what stands here goes on being served.
            core.drop_kept()
            self._reclaim = MemoryReclaim(core, MemoryChoice.SPARE)
            return self._take()
        core.hold(None)
        core.table.stop_granting(core.key)
        self._vacated = True
        self._drain_until = now + core.config.refill_drain_s
        return self._when_read_out(now)

    def _when_read_out(self, now: float) -> bool:
        core = self._core
        if core.table.reading(core.key) > 0 and now < self._drain_until:
            return False
        core.break_readers("the shard is being filled with another version")
        self._reclaim = self._reclaim or MemoryReclaim(core, MemoryChoice.OWN)
        return self._take()

    def _take(self) -> bool:
        """No lease is left on what is to be overwritten; it may be written once no process maps it either."""
        core, vacancy = self._core, self._reclaim
        if vacancy is None:
            return False
        vacancy.seek()
        if not vacancy.is_found:
            return False
        self._reclaim = None
        self._vacated = False
        if not core.spec.swaps:
            core.set_memory(MemoryState.FILLING, partial=True, kept=None)
        return True

    def on_outcome(self, outcome: EffectOutcome, now: float) -> bool:
        """Take what was found out about who maps the memory."""
        if self._reclaim is None:
            return False
        self._reclaim.on_outcome(outcome, now)
        return self._take()

    def on_readers_gone(self, now: float) -> bool:
        """The last reader of what stood here went."""
        return self._reclaim is None and self._when_read_out(now)

    def tick(self, now: float) -> bool:
        """Let time pass while readers are waited for."""
        if self._reclaim is not None:
            self._reclaim.tick(now)
            return self._take()
        return now >= self._drain_until and self._when_read_out(now)

    def deadline(self) -> float | None:
        """Say when `tick` is wanted while readers are waited for."""
        return self._drain_until if self._reclaim is None else self._reclaim.deadline()

    @property
    def is_blocked(self) -> bool:
        """Whether the memory can't be written because somebody maps it."""
        return self._reclaim is not None and self._reclaim.is_blocked

    # What it holds then.

    def keep(self, version: int, root: str, digests: bytes) -> None:
        """Have the manifest say what was filled, before the log counts it: an agent killed behind that must find it."""
        self._keeping = self._core.number()
        self._core.emit(Keep(key=self._core.key, number=self._keeping, version=version, root=root, digests=digests))

    def has_kept(self, outcome: Kept) -> bool:
        """Tell whether this answers the last question."""
        return outcome.number == self._keeping

    def filled(self, event: ShardFilled, digests: bytes) -> None:
        """The log counts this shard as ready, so others may read it; one that swaps only with its whole replica."""
        if self._core.spec.swaps:
            self._beside = event.version, event.root
        else:
            self.stand(event.version, event.root, digests)

    def fill_at_once(self, version: int, root: str) -> None:
        """The round began and ended with this shard's word, and the log says of it only that the replica is ready."""
        self._beside = version, root

    def swap(self, version: int, digests: bytes) -> None:
        """The whole replica holds the version: what was filled with it beside the old one takes its place."""
        if self._beside is not None and self._beside[0] == version:
            self.stand(version, self._beside[1], digests, swap=True)

    def stand(self, version: int, root: str, digests: bytes, *, swap: bool = False) -> None:
        """Let others read what was filled; with `swap` in place of what stood here, whose readers are told."""
        core = self._core
        if swap:
            core.break_readers("the shard has swapped to another version")
        core.set_memory(
            MemoryState.READY, swap=swap, version=version, root=root, digests=digests, partial=False, kept=None
        )
        if not core.spec.mapped:
            core.table.offer(core.key, version, root, digests)

    def begin_anew(self) -> None:
        """The log decided again, so no other shard is waited for, and what was filled beside does not count."""
        self._beside = self._reclaim = self._keeping = None

    def stated(self) -> None:
        """The agent has joined anew and stated what stands here untouched: the log counts it again, so it is served."""
        core, contents = self._core, self._core.contents
        if self._vacated and contents.memory is MemoryState.READY:
            self._vacated, self._reclaim = False, None
            core.break_waiting("the agent joined anew")
            if contents.root is not None:
                core.table.offer(core.key, contents.version, contents.root, contents.digests)

    def leave(self) -> None:
        """The read ends here, and nothing is written any more."""
        core = self._core
        if core.contents.memory is MemoryState.FILLING:
            # The memory stays as it is: a part of a version.
            core.set_memory(MemoryState.EMPTY, partial=True)
        elif self._vacated and core.contents.memory is MemoryState.READY:
            # The log counts it as given up, and nothing was written yet.
            core.break_readers("the shard was to be filled with another version")
            core.set_memory(MemoryState.EMPTY)
