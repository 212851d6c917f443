"""What must hold when a worker's call ends: of the memory, of the log, and of the other shards of the same round."""

from tensorhub_agent.core.effects import CallPublish, CallRead, CallUnpublish, CompleteCall, FailCall
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.state import root_key
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.invariants.log_rules import LogRules
from tensorhub_simulator.faultsim.invariants.reference import Reference
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.observations import CallEnded


class CallRules:
    """Judges each end of a call. Raises `Violation`."""

    def __init__(self, job: Job, reference: Reference, rules: LogRules) -> None:
        """Begin with no round answered."""
        self._job, self._reference, self._rules = job, reference, rules
        self._answers: dict[tuple[ShardKey, int], set[int | None]] = {}
        job.subscribe(CallEnded, self._on_end)

    def _on_end(self, ended: CallEnded) -> None:
        key, end = ended.key, ended.end
        if ended.is_written:
            raise Violation("one writer", f"{key}: a call ends while something can be written: {end}")
        if isinstance(end, FailCall):
            if isinstance(ended.call, CallRead) and ended.spec is not None and ended.has_swapped:
                raise Violation("swap with all", f"{key} has swapped in a read that failed: {end}")
        elif isinstance(ended.call, CallRead):
            self._read(ended, end)
        elif isinstance(ended.call, CallPublish):
            if end.version is None or not self._is_true(ended, end.version):
                what = f"a publish of {key} returned {end.version}, and the log has other bytes"
                raise Violation("exact version", what)
        elif isinstance(ended.call, CallUnpublish):
            self._unpublish(ended)

    def _is_true(self, ended: CallEnded, version: int) -> bool:
        assert ended.spec is not None
        place = root_key(ended.spec.shards, ended.key.shard, ended.spec.layout)
        return self._reference.is_true(ended.key.model, version, place, ended.data)

    def _unpublish(self, ended: CallEnded) -> None:
        key, core = ended.key, ended.core
        shard = core.shards.get(key)
        if shard is None and core.deleted is None:
            raise Violation("mutability", f"unpublish of {key} returned, and the shard is gone")
        if shard is not None and shard.contents.memory is not MemoryState.EMPTY:
            raise Violation("mutability", f"unpublish of {key} returned while its memory is {shard.contents.memory}")
        counted = [
            name
            for name, session in self._job.sessions.items()
            if session.source.name == ended.agent and session.source_key == key and core.leases.holds(name)
        ]
        if counted or core.leases.reading(key):
            raise Violation("no counted lease", f"unpublish of {key} returned while {counted} can still be counted")

    def _read(self, ended: CallEnded, end: CompleteCall) -> None:
        key, rules = ended.key, self._rules
        if end.version is not None and not self._is_true(ended, end.version):
            what = f"a read of {key} returned {end.version}, and its memory holds other bytes"
            raise Violation("exact version", what)
        if ended.want_by is None or ended.want_by not in rules.round_of:
            raise Violation("one answer per round", f"a read of {key} returned {end.version} and was in no round")
        number = rules.round_of[ended.want_by]
        said = rules.answers.get(number, "nothing")
        if end.version is None and end.report is not None and end.report.failure:
            # The round failed, and the shard holds what it held: an update says so by None.
            if said != "nothing":
                raise Violation("the log's answer", f"an update of {key} gave up, and the log ended it with {said}")
            # That is no answer of the round, which may be taken up anew and end with a version.
            return
        if said != end.version:
            raise Violation("the log's answer", f"a read of {key} returned {end.version}; the log ended it with {said}")
        answers = self._answers.setdefault((ShardKey(key.model, key.replica, 0), number), set())
        answers.add(end.version)
        if len(answers) > 1:
            raise Violation("one answer per round", f"round {number} of {key.replica} answered {answers}")
