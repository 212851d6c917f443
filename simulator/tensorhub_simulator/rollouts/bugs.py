"""Planted bugs: each replaces a piece of a production core by a wrong one, which a seed must find."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import msgspec

from tensorhub._rollouts.collector import Collector, Place
from tensorhub_common.catalog import apply as apply_module
from tensorhub_common.catalog.availability import Out
from tensorhub_common.catalog.handlers import holding
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.commands import Hold
from tensorhub_common.protocol.rollout import payloads
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import (
    AbortRequest,
    PublishedVersions,
    Sampling,
    VersionRule,
    attempt_of,
)
from tensorhub_common.protocol.rollout.questions import ReadyAnswer
from tensorhub_rollout.core import checkpoints, open_requests
from tensorhub_rollout.core.admission import Admission, GroupId
from tensorhub_rollout.core.assignments import Assignments
from tensorhub_rollout.core.fleet import Fleet
from tensorhub_rollout.core.frame_rows import Row
from tensorhub_rollout.core.instance import Instance
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.core.leader_events import (
    FrameCame,
    HeartbeatCame,
    PrefixLoaded,
    SendAbort,
)
from tensorhub_rollout.core.open_requests import OpenRequests
from tensorhub_rollout.core.pinned_requests import why_gone
from tensorhub_rollout.core.placement import Placement
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.decisions import version_holds
from tensorhub_rollout.log import fold as fold_module
from tensorhub_rollout.policy import activation, balancing, retention
from tensorhub_rollout.policy.balancing import BalancingLimits
from tensorhub_rollout.policy.view import InstanceView
from tensorhub_runner.core import runner as runner_module
from tensorhub_runner.core.runner import Runner
from tensorhub_runner.core.runner_events import Begin, WeightsLoaded

Replacement = tuple[object, str, object]


def _remembering(taken: Callable[[Leader, FrameCame, dict[Attempt, RequestId]], None]) -> tuple[Replacement, ...]:
    """Do something with each frame that knows the requests of all attempts that ever were."""
    over, frame = OpenRequests.attempt_over, Leader._frame
    requests: dict[Attempt, RequestId] = {}

    def remember(self: OpenRequests, placement: Placement, *arguments: Any, **more: Any) -> None:
        requests[placement.attempt] = placement.request
        over(self, placement, *arguments, **more)

    def both(self: Leader, event: FrameCame) -> None:
        taken(self, event, requests)
        frame(self, event)

    return (OpenRequests, "attempt_over", remember), (Leader, "_frame", both)


def _older_frame() -> tuple[Replacement, ...]:
    """Tokens of a request's earlier attempt are taken for those of its live one."""

    def taken(self: Leader, event: FrameCame, requests: dict[Attempt, RequestId]) -> None:
        frame, at = event.frame, 0
        columns = (memoryview(column).cast("q") for column in (frame.attempts, frame.starts, frame.counts))
        for key, start, count in zip(*columns, strict=True):
            rows = slice(at, at := at + 4 * count)
            request = self.requests.get(requests.get(attempt_of(key), RequestId(0, 0)))
            placement = None if request is None else request.placement
            if placement is not None and placement.request in self.responses:
                tokens, logprobs = memoryview(frame.tokens)[rows], memoryview(frame.logprobs)[rows]
                row = Row(placement.attempt, start, count, tokens, logprobs)
                self._progress._take(self.instances[placement.runner], placement, row, ())

    return _remembering(taken)


def _first_finish() -> tuple[Replacement, ...]:
    """The first attempt to finish ends its request, also where it is not the live one."""

    def taken(self: Leader, event: FrameCame, requests: dict[Attempt, RequestId]) -> None:
        for finished in event.frame.finished:
            request = self.requests.get(requests.get(finished.attempt, RequestId(0, 0)))
            if request is not None and request.placement is not None:
                request.placement.finished = finished

    return _remembering(taken)


def _gap_taken() -> tuple[Replacement, ...]:
    """A frame that begins behind what is held is taken."""
    known = Response.take

    def take(self: Response, start: int, tokens: memoryview, logprobs: memoryview) -> bool:
        return known(self, min(start, self.count), tokens, logprobs)

    return ((Response, "take", take),)


def _later_end() -> tuple[Replacement, ...]:
    """A later end takes the place of the first one."""
    known = fold_module._Step._open_request

    def open_request(self: Any, of: RequestId) -> Any:
        request = self.state.request(of)
        if request is not None and request.end is not None:
            return request, self.state.submissions[of.submission].groups[request.group]
        return known(self, of)

    return ((fold_module._Step, "_open_request", open_request),)


def _two_leaders() -> tuple[Replacement, ...]:
    """Entries of an older leader count."""
    return ((fold_module._Step, "_check_term", lambda self, term: None),)


def _attempts_without_terms() -> tuple[Replacement, ...]:
    """A new leader counts its attempts from 1 again, and the term is no part of them."""
    known = Leader.__init__

    def init(self: Leader, *arguments: Any) -> None:
        known(self, *arguments)
        self.term = self.attempts._term = 1

    return ((Leader, "__init__", init),)


def _closed_before_the_log() -> tuple[Replacement, ...]:
    """A runner forgets a response once its end is to be written, and not once it is folded."""
    known = OpenRequests.store_end

    def store_end(self: OpenRequests, of: RequestId) -> None:
        known(self, of)
        request, attempts = self.by_id.get(of), self._attempts
        placement = None if request is None else request.placement
        instance = None if placement is None else self._fleet.instances.get(placement.runner)
        if placement is not None and instance is not None:
            forget = AbortRequest(attempts._log, attempts._term, instance.incarnation, forget=(placement.attempt,))
            self._context.effects.append(SendAbort(instance.runner, forget))

    return ((OpenRequests, "store_end", store_end),)


def _half_prefix() -> tuple[Replacement, ...]:
    """A runner begins before the whole prefix is there."""
    return ((runner_module.Held, "is_whole", property(lambda self: True)),)


def _prefix_forgotten() -> tuple[Replacement, ...]:
    """What checkpoints hold is not read: a request goes on from nothing, but counts from where it was."""
    known = Assignments.prefix_loaded

    def loaded(self: Assignments, event: PrefixLoaded) -> None:
        known(self, msgspec.structs.replace(event, tokens=event.tokens[:-4], logprobs=event.logprobs[:-4]))

    return ((Assignments, "prefix_loaded", loaded),)


def _version_late() -> tuple[Replacement, ...]:
    """Tokens are counted for the version before until their attempt ends."""
    known = Runner._weights_loaded

    def loaded(self: Runner, event: WeightsLoaded) -> None:
        with mock.patch.object(Runner, "_add_run", lambda *_, **__: None):
            known(self, event)

    return ((Runner, "_weights_loaded", loaded),)


def _on_after_the_stop() -> tuple[Replacement, ...]:
    """A request whose stop token is here goes on, because its runner has not said that it ended."""
    return ((Sampling, "ended_by", lambda self, tokens: None),)


def _acknowledged_again() -> tuple[Replacement, ...]:
    """What is done is kept as undone."""
    known = fold_module._Step._forget

    def forget(self: Any, of: RequestId, how: Any) -> None:
        request = self.state.request(of)
        end = request.end
        known(self, of, how)
        if end is not None and of.index == 0:
            self.state.consumers["main"].ended.setdefault(end.seq, []).append(of)

    return ((fold_module._Step, "_forget", forget),)


def _silence_while_cut() -> tuple[Replacement, ...]:
    """A leader counts silence also while it has no connection."""
    return ((Leader, "_bus_changed", lambda self, event: None),)


def _silence_while_asleep() -> tuple[Replacement, ...]:
    """A leader that was stopped takes all runners for lost when it wakes up."""

    def note_time(self: Fleet, now: float) -> None:
        self._now = now

    return ((Fleet, "note_time", note_time),)


def _forgotten_early() -> tuple[Replacement, ...]:
    """The runner of an attempt that was stopped may forget it before a later one is confirmed."""
    known = OpenRequests.attempt_over

    def over(self: OpenRequests, placement: Placement, *arguments: Any, **more: Any) -> None:
        known(self, placement, *arguments, **more)
        self._attempts.forget_earlier(placement.request)

    return ((OpenRequests, "attempt_over", over),)


def _older_checkpoint() -> tuple[Replacement, ...]:
    """A checkpoint goes on behind what the log has, also where a later attempt began before that."""
    return ((checkpoints, "_kept_of", lambda response, placement, stored: stored.kept),)


def _cap_ignored() -> tuple[Replacement, ...]:
    """Requests are placed wherever there is an instance, however many are pending there."""
    known = balancing._select
    return ((balancing, "_select", lambda view, limits: known(view, BalancingLimits(1 << 20))),)


def _seed_of_the_group() -> tuple[Replacement, ...]:
    """All requests of a group draw with one seed."""
    known = payloads.request_seed
    return ((payloads, "request_seed", lambda seed, group, index: known(seed, group, 0)),)


def _place_from_the_attempt() -> tuple[Replacement, ...]:
    """Noise is drawn by how many tokens the attempt has made, and not by the place in the response."""
    known = Runner._begin

    def begin(self: Runner, attempt: Attempt, held: Any) -> None:
        known(self, attempt, held)
        if self._effects and isinstance(self._effects[-1], Begin):
            self._effects[-1] = msgspec.structs.replace(self._effects[-1], tokens=b"")

    return ((Runner, "_begin", begin),)


def _rule_judged_once() -> tuple[Replacement, ...]:
    """The leader judges the version rule, and the runner does not."""
    return ((Runner, "_is_allowed", lambda self, held: True),)


def _staleness_by_number() -> tuple[Replacement, ...]:
    """Staleness is the distance of version numbers, and not how many versions are published between."""

    def allows(self: VersionRule, version: int, versions: PublishedVersions) -> bool:
        return max(versions.published, default=version) - version <= self.staleness and not versions.is_retired(version)

    return ((VersionRule, "allows", allows),)


def _age_ignored() -> tuple[Replacement, ...]:
    """A response is delivered however old it is."""
    return ((OpenRequests, "is_too_old", lambda self, of: False),)


def _rewind_ignored() -> tuple[Replacement, ...]:
    """What has tokens of retired versions goes on."""
    return ((OpenRequests, "_has_retired", lambda self, of: False),)


def _cache_kept() -> tuple[Replacement, ...]:
    """After a change of weights attempts go on with the cache of the version before, and don't say so."""
    known = Runner._weights_loaded

    def loaded(self: Runner, event: WeightsLoaded) -> None:
        def go_on(self: Runner, _: Attempt, held: Any) -> None:
            held.is_running = True
            self._add_run(held)

        with mock.patch.object(Runner, "_begin", go_on), mock.patch.object(Runner, "_leave", lambda *_: None):
            known(self, event)

    return ((Runner, "_weights_loaded", loaded),)


def _delivered_twice() -> tuple[Replacement, ...]:
    """The trainer asks from the beginning of an entry, of which it has a part."""
    known = Collector.take

    def take(self: Collector, place: Place, answer: ReadyAnswer) -> bool:
        is_taken = known(self, place, answer)
        self.place = Place(self.place.after)
        return is_taken

    return ((Collector, "take", take),)


def _moved_while_prefilling() -> tuple[Replacement, ...]:
    """A request moves to an idle instance until its first token is here, and its prompt is computed anew each time."""
    return ((InstanceView, "queued", property(lambda self: len(self.pending))),)


def _blamed_together() -> tuple[Replacement, ...]:
    """Every request that was begun with the one that kills its instance is blamed for it."""
    return ((OpenRequests, "blamed", lambda self, lost: lost),)


def _room_judged_late() -> tuple[Replacement, ...]:
    """A group that begins counts from the next look at payloads on: all of one look of the policy begin."""

    def admit(self: Admission, group: GroupId) -> bool:
        return not self.is_held_back or group in self.begun

    return ((Admission, "admit", admit),)


def _begun_by_placements_alone() -> tuple[Replacement, ...]:
    """A group whose other members have ended, or whose tokens the log keeps, waits for room like one that is new."""

    def has_begun(self: OpenRequests, of: RequestId) -> bool:
        return self.by_id[of].placement is not None

    return ((OpenRequests, "_has_begun", has_begun),)


def _pinned_judged_once() -> tuple[Replacement, ...]:
    """What is for one version is judged when versions change, and not when an instance leaves that version."""

    def not_judging(known: Callable[..., None]) -> Callable[..., None]:
        def call(self: object, *arguments: Any) -> None:
            with mock.patch.object(OpenRequests, "end_unreachable", lambda *_: None):
                known(self, *arguments)

        return call

    judging = ((Leader, "_heartbeat"), (OpenRequests, "_wait"), (Leader, "_want"))
    return tuple((owner, name, not_judging(getattr(owner, name))) for owner, name in judging)


def _pinned_judged_early() -> tuple[Replacement, ...]:
    """A new leader judges what is for one version before it has heard who has what."""
    known = OpenRequests.end_unreachable

    def end_unreachable(self: OpenRequests, *arguments: Any) -> None:
        gathered, self._fleet.has_gathered = self._fleet.has_gathered, True
        known(self, *arguments)
        self._fleet.has_gathered = gathered

    return ((OpenRequests, "end_unreachable", end_unreachable),)


def _kept_not() -> tuple[Replacement, ...]:
    """A runner goes on to the newest version, whatever it was told to keep."""
    return ((Runner, "_is_kept", property(lambda _: False)),)


def _newest_by_default() -> tuple[Replacement, ...]:
    """A new leader tells runners to follow the newest version before a policy has said what they are to have."""
    heartbeat = Leader._heartbeat

    def tell(self: Leader, event: HeartbeatCame) -> None:
        instance = self.instances.get(event.runner)
        if instance is not None and instance.version_wanted is None:
            instance.version_wanted = "newest"
            self.fleet.note_changed(instance)
        heartbeat(self, event)

    return ((Leader, "_heartbeat", tell),)


def _hub_ignored() -> tuple[Replacement, ...]:
    """What is for one version fails where no instance has it, though the hub does."""

    def why(version: int, versions: PublishedVersions, _: frozenset[int], instances: list[Instance]) -> str | None:
        return why_gone(version, versions, frozenset(), instances)

    return ((open_requests, "why_gone", why),)


def _last_given_up() -> tuple[Replacement, ...]:
    """An instance's turn ends though the hub does not keep its version, and requests are for that alone."""
    return ((activation, "_may_be_lost", lambda *_: False),)


def _kept_without_weights() -> tuple[Replacement, ...]:
    """A runner that has let go of its weights keeps what it was to generate."""
    return ((Runner, "_supersede_all", lambda _: None),)


def _hold_unfenced() -> tuple[Replacement, ...]:
    """A late hold takes the place of a later one."""

    def hold(catalog: Catalog, command: Hold, out: Out) -> None:
        holds = catalog.models[command.model].holds
        for holder, known in holds.items():
            holds[holder] = replace(known, term=0, n=0)
        holding.hold(catalog, command, out)

    return ((apply_module, "_HANDLERS", {**apply_module._HANDLERS, Hold: hold}),)


def _hold_without_end() -> tuple[Replacement, ...]:
    """What was held once stays held, though no request needs it any more."""

    def decide(
        needed: Collection[int], available: Collection[int], held: Collection[int], *rest: Any, **more: Any
    ) -> Any:
        return retention.decide({*needed, *held}, available, held, *rest, **more)

    return ((version_holds, "decide", decide),)


def _hold_stated_once() -> tuple[Replacement, ...]:
    """A hold that stands is never stated again."""
    return ((version_holds, "RENEWALS", 1e-6),)


BUGS: Final[Mapping[str, Callable[[], tuple[Replacement, ...]]]] = {
    "older-frame": _older_frame,
    "gap-taken": _gap_taken,
    "later-end": _later_end,
    "first-finish": _first_finish,
    "two-leaders": _two_leaders,
    "attempt-without-term": _attempts_without_terms,
    "closed-before-log": _closed_before_the_log,
    "half-prefix": _half_prefix,
    "prefix-forgotten": _prefix_forgotten,
    "version-late": _version_late,
    "on-after-stop": _on_after_the_stop,
    "done-again": _acknowledged_again,
    "silence-while-cut": _silence_while_cut,
    "silence-while-asleep": _silence_while_asleep,
    "forgotten-early": _forgotten_early,
    "older-checkpoint": _older_checkpoint,
    "cap-ignored": _cap_ignored,
    "seed-of-group": _seed_of_the_group,
    "place-from-attempt": _place_from_the_attempt,
    "rule-judged-once": _rule_judged_once,
    "staleness-by-number": _staleness_by_number,
    "age-ignored": _age_ignored,
    "rewind-ignored": _rewind_ignored,
    "cache-kept": _cache_kept,
    "delivered-twice": _delivered_twice,
    "moved-while-prefilling": _moved_while_prefilling,
    "blamed-together": _blamed_together,
    "room-judged-late": _room_judged_late,
    "begun-by-placements-alone": _begun_by_placements_alone,
    "pinned-judged-once": _pinned_judged_once,
    "pinned-judged-early": _pinned_judged_early,
    "kept-not": _kept_not,
    "newest-by-default": _newest_by_default,
    "hub-ignored": _hub_ignored,
    "last-given-up": _last_given_up,
    "kept-without-weights": _kept_without_weights,
    "hold-unfenced": _hold_unfenced,
    "hold-without-end": _hold_without_end,
    "hold-stated-once": _hold_stated_once,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with a bug."""
    with ExitStack() as stack:
        for target, attribute, replacement in BUGS[name]():
            stack.enter_context(mock.patch.object(target, attribute, replacement))
        yield
