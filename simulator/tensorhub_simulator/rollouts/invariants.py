"""What must hold once all is over: section by section of docs/design/rollouts/index.md, "What always holds"."""

import struct

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_simulator.rollouts.model import STOP, TOKENS_MAX, token_of
from tensorhub_simulator.rollouts.processes import Written
from tensorhub_simulator.rollouts.world import RolloutWorld


def check(world: RolloutWorld) -> None:
    """Raise AssertionError where a response is lost, twice, torn, or of a version that did not make it."""
    assert len(set(world.opened)) == len(world.opened)
    assert sorted(world.ended) == sorted(world.opened), "each request ends once"
    assert sorted(world.done) == sorted(world.opened), "each response is done once"
    assert len(set(world.yielded)) == len(world.yielded), "nothing is yielded twice within one attachment"
    for of, written in world.responses.items():
        _check_response(of, world.seeds[of], written)
        _check_rewinds(of, written, world.hub.rewinds)
    for of, error in world.failed.items():
        is_gone = of in world.pinned and f"it was for version {world.pinned[of]} alone" in str(error)
        assert of in world.poisoned or is_gone, f"{of} failed, and nothing was wrong with it: {error}"
    unanswered = set(world.opened) - world.responses.keys() - world.cancelled - world.failed.keys()
    assert not unanswered, f"requests that were not cancelled have no response: {sorted(unanswered)}"


def _check_rewinds(of: RequestId, written: Written, rewinds: list[tuple[int, int]]) -> None:
    """No response has tokens from before a rewind and from after it, unless the rewind kept their version."""
    versions = [run.version for run in written.runs]
    for first, last in rewinds:
        retired = [each for each in versions if first <= each <= last]
        later = [each for each in versions if each > last]
        assert not (retired and later), f"response {of} goes on with {later} behind retired {retired}"


def _check_response(of: RequestId, seed: int, written: Written) -> None:
    """Each token was made by the attempt and on the version that its run names; a later run has no earlier attempt.

    The fake engine writes its version as the log-probability.
    """
    count = len(written.tokens) // 4
    tokens = struct.unpack(f"<{count}i", written.tokens)
    versions = [int(-each) for each in struct.unpack(f"<{count}f", written.logprobs)]
    assert STOP not in tokens[:-1], f"response {of} goes on after its stop token"
    assert count == TOKENS_MAX or tokens[-1:] == (STOP,), (
        f"response {of} ends after {count} tokens without a stop token"
    )
    starts = [run.start for run in written.runs]
    assert starts == sorted(set(starts)), f"runs of {of} are not in order: {starts}"
    assert starts[:1] == [0], f"the first tokens of {of} have no run"
    attempts = [run.attempt for run in written.runs]
    assert attempts == sorted(attempts), f"an earlier attempt of {of} follows a later one: {attempts}"
    for run, stop in zip(written.runs, [*starts[1:], count], strict=True):
        assert set(versions[run.start : stop]) == {run.version}, f"a run of {of} names the wrong version"
        made = [token_of(seed, position, run.attempt) for position in range(run.start, stop)]
        assert made == [*tokens[run.start : stop]], f"a run of {of} has tokens of another attempt"
