"""What the leading manager of a job does: places requests, collects their tokens, and ends them. Pure.

It begins once its `lead` is folded, with nothing but the state of the log, and asks runners what they hold. It decides
no placement by itself: a policy says `Place` and `Withdraw`, and what no rule allows is not done.

Invariants (`check`):
- A request has at most one attempt that is not over. Tokens count only of that one, at the place that is held.
- An attempt that this leader makes is higher than all that it knows of the request.
- The runner of an earlier attempt forgets it only after a later one is confirmed, or the request has ended.
- What a runner has, the leader tells it to forget, or holds it in `placements`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    DEFAULT_POLICY,
    Attempt,
    ManagerEndReason,
    RequestEnded,
    RequestId,
)
from tensorhub_common.protocol.rollout.messages import (
    TOKEN_BYTES,
    AbortRequest,
    Assign,
    AssignRequest,
    Finished,
    Frame,
    FrameResult,
    HeartbeatResult,
    HeldAttempt,
    PublishedVersions,
    Report,
    ReportResult,
    TokenRun,
    VersionRule,
    attempt_key,
    attempt_of,
    is_well_formed,
)
from tensorhub_rollout.core.admission import Admission, GroupId
from tensorhub_rollout.core.checkpoints import checkpoint
from tensorhub_rollout.core.fleet import Fleet
from tensorhub_rollout.core.leader_counts import DiscardReason, LeaderCounts
from tensorhub_rollout.core.leader_events import (
    AbortAnswered,
    AnswerFrame,
    AnswerHeartbeat,
    AnswerReport,
    AssignAnswered,
    BusChanged,
    EndSeeding,
    EntryFolded,
    FrameCame,
    HeartbeatCame,
    InstanceLost,
    LeaderEffect,
    LeaderInput,
    LoadingFailed,
    LoadPrefix,
    LoadPrompt,
    Place,
    PrefixLoaded,
    PromptLoaded,
    ReportCame,
    RoomSeen,
    SendAbort,
    SendAssign,
    StoreEnd,
    StoringFailed,
    VersionsSeen,
    Want,
    Withdraw,
)
from tensorhub_rollout.core.lengths import ResponseLengths
from tensorhub_rollout.core.pinned_requests import PinnedRequests, why_gone
from tensorhub_rollout.core.placements import (
    AttemptState,
    AttemptTransition,
    Instance,
    OpenRequest,
    PastAttempt,
    Placement,
)
from tensorhub_rollout.core.responses import Response, TokensDiffer
from tensorhub_rollout.core.step_meter import StepMeter
from tensorhub_rollout.core.version_arrivals import VersionArrivals
from tensorhub_rollout.core.waiting import WaitingQueue
from tensorhub_rollout.log.outcomes import Acknowledged, Attached, Cancelled, Ended, Submitted
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.log.transitions import RequestState
from tensorhub_rollout.policy.plateau import fitted
from tensorhub_rollout.policy.view import FleetView, InstanceView


class LeaderLimits(msgspec.Struct, frozen=True):
    """The bounds of a leader; times in seconds."""

    silence_s: float = 0.5
    """A runner that says nothing for so long is lost."""
    stall_s: float = 60.0
    """So is one whose engine makes no step for so long, though it has work."""
    gather_s: float = 1.0
    """So long a new leader waits for reports before it places anything."""
    resend_s: float = 0.25
    """What was not answered is asked again."""
    checkpoint_s: float = 2.0
    rate_s: float = 1.0
    """Each instance's tokens per second are counted over so long."""
    admission_share_max: float = 0.7
    """No further group begins once payloads, with the largest size of the begun groups, have this share of the room."""
    fitted_s: float = 1.0
    """How often the steps of an engine are fitted anew, where it has made some."""
    look_s: float = 0.02
    """What time alone changes is looked at so often, and not with each frame: a look is at every placement."""
    frames_per_s_max: int = 2000
    """Limit of the frames a second that are asked for, of all instances together. A frame costs more than its rows, of
    which a larger fleet has fewer in each."""
    assign_tokens_max: int = 32_768
    """Limit of the tokens of prompts and prefixes in one message; a longer prefix comes in parts."""
    attempts_max: int = 5
    """A request fails after this number of attempts one after the other without a new token, while no other request
    was tried on the same instance."""
    lost_together_max: int = 2
    """A request that was lost so often without a new token, together with others, is tried alone on an instance."""
    restarts_max: int = 3
    """A request that was restarted so often goes on with its tokens on the next version."""


STAYS_BEHIND_MAX: Final = 3
"""Limit of the newer versions that an instance lacks which stays on its own, also where a rule allows more."""

ENDED_MAX: Final = 4096
"""Limit of the requests that have ended and are not done of which the attempts are remembered, the latest."""

_ADOPTED: Final = "it ran there when this manager began to lead"
_WHY_ANEW: Final[Mapping[DiscardReason, str]] = {
    "restart": "new weights have come, and it begins anew then",
    "age": "more newer versions are published than max_age allows behind its oldest token",
    "rewind": "the trainer has gone back behind a version that made some of its tokens",
}
_NO_VERSIONS: Final = PublishedVersions(0)

_AT_WORK: Final = frozenset({AttemptState.PREPARED, AttemptState.ASSIGNED, AttemptState.HELD})
_AT_RUNNER: Final = frozenset({AttemptState.ASSIGNED, AttemptState.HELD, AttemptState.STOPPING})
"""The runner may have begun with it."""


class Leader:
    """The leader of one job under one term."""

    def __init__(self, state: RolloutState, log: str, limits: LeaderLimits, now: float) -> None:
        """Begin; `state` is folded up to this leader's `lead`, and stays folded by the driver."""
        self.state, self.log, self.term, self.limits = state, log, state.term, limits
        self.fleet = Fleet(now, silence_s=limits.silence_s, stall_s=limits.stall_s, gather_s=limits.gather_s)
        self.instances: Final[Mapping[str, Instance]] = self.fleet.instances
        """By runner."""
        self.placements: dict[Attempt, Placement] = {}
        """All attempts that are not over."""
        self.requests: dict[RequestId, OpenRequest] = {}
        self.responses: dict[RequestId, Response] = {}
        """Tokens of open requests, as far as this leader has them."""
        self.ended: dict[RequestId, tuple[PastAttempt, ...]] = {}
        """The attempts of the latest requests that have ended and are not done; nothing is decided by them."""
        self.lengths = ResponseLengths(state, self._held)
        self.versions: dict[str, PublishedVersions] = {}
        """By model."""
        self._hub: dict[str, VersionsSeen] = {}
        """By model: what the hub has of its versions."""
        self.waiting = WaitingQueue()
        self.pinned = PinnedRequests()
        self.counts = LeaderCounts()
        self._alone: set[RequestId] = set()
        """Requests that are tried alone: each may be what kills the instances that begin with it."""
        self._asked: dict[Attempt, Placement] = {}
        """Attempts that were asked to begin or to stop, and did not answer since."""
        self.admission = Admission(state, limits.admission_share_max)
        self._steps: dict[str, int] = {}
        """By model: how many of its newest versions this leader has seen."""
        self._meters: dict[str, StepMeter] = {}
        """By model."""
        self._arrivals: dict[str, VersionArrivals] = {}
        """By model."""
        self._rules: dict[str, tuple[str, int, VersionRule]] = {}
        """By model: the rule of the latest request that is for no version alone, with its consumer and attachment."""
        self._shown_for: dict[str, tuple[object, ...]] = {}
        """By model: what else, beside an instance itself, policies saw in what they saw of it."""
        self._effects: list[LeaderEffect] = []
        self._n = 0
        self._looked_at = self._now = now
        for of, _, request in state.requests():
            if request.state is RequestState.OPEN:
                self._open(of)
        self._handlers: Final[Mapping[type, Callable[[Any], None]]] = {
            AbortAnswered: self._abort_answered,
            AssignAnswered: self._assign_answered,
            BusChanged: self._bus_changed,
            EndSeeding: self._end_seeding,
            EntryFolded: self._entry_folded,
            FrameCame: self._frame,
            HeartbeatCame: self._heartbeat,
            LoadingFailed: self._loading_failed,
            Place: self._place,
            PrefixLoaded: self._prefix_loaded,
            PromptLoaded: self._prompt_loaded,
            ReportCame: self._report,
            RoomSeen: self._room_seen,
            StoringFailed: self._storing_failed,
            VersionsSeen: self._versions_seen,
            Want: self._want,
            Withdraw: self._withdraw,
        }

    # ------------------------------------------------------------------------------------------ machine

    def handle(self, event: LeaderInput, now: float) -> list[LeaderEffect]:
        """Take one event and say what to do."""
        self._now = now
        self.fleet.note_time(now)
        if not isinstance(event, Tick):
            self._handlers[type(event)](event)
        if now >= self.deadline():
            self._looked_at = now
            self._on_time()
        effects, self._effects = self._effects, []
        return effects

    def deadline(self) -> float:
        """Return when time alone may change something."""
        return self._looked_at + self.limits.look_s

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        open_ = {of for of, _, request in self.state.requests() if request.state is RequestState.OPEN}
        assert self.requests.keys() == open_
        assert self.responses.keys() <= open_
        assert {of for of in open_ if of in self.waiting} == {of for of in open_ if self.requests[of].is_waiting}
        self.pinned.check(open_)
        assert len(self.waiting) == sum(each.is_waiting for each in self.requests.values())
        assert self._asked == {each.attempt: each for each in self.placements.values() if each.asked_at is not None}
        live = {each.placement.attempt for each in self.requests.values() if each.placement is not None}
        assert live == self.placements.keys()
        for attempt, placement in self.placements.items():
            assert placement.attempt == attempt
            assert placement.state is not AttemptState.OVER
            instance = self.instances.get(placement.runner)
            assert placement.state is AttemptState.COMPLETE or (instance is not None and attempt in instance.attempts)
        for instance in self.instances.values():
            assert instance.attempts <= self.placements.keys()
            assert not instance.attempts & instance.to_forget.keys()
            at_work = [self.placements[each] for each in instance.attempts]
            wanted = {each.request for each in at_work if each.state in _AT_WORK}
            assert {*instance.pending, *instance.executing} == wanted
            assert not {*instance.pending} & {*instance.executing}
            for key, (response, _) in instance.streaming.items():
                placement = self.placements[attempt_of(key)]
                assert placement.request in instance.executing
                assert placement.finished is None
                assert response is self.responses[placement.request]
                assert response.attempt == placement.attempt
        self.fleet.check()
        for model in self.fleet.models():
            shown = self._shown_instances(model)
            for instance in self.instances.values():
                instance.shown = None
            assert self._shown_instances(model) == shown

    def _bus_changed(self, event: BusChanged) -> None:
        self.fleet.note_connection(is_connected=event.is_connected)

    def _versions_seen(self, event: VersionsSeen) -> None:
        known = self.versions.get(event.model, _NO_VERSIONS)
        self.versions[event.model], self._hub[event.model] = event.versions, event
        newest = max(event.versions.published, default=-1)
        self._arrivals_of(event.model).published(newest, self._now, is_new=event.model in self._steps)
        if newest > max(known.published, default=-1):
            self._steps[event.model] = self._steps.get(event.model, 0) + 1
            meter = self.meter(event.model)
            meter.see_fleet(self.fleet.remote_of(event.model))
            meter.end(newest, self._now)
            self._restart_too_old(event.model)
        if event.versions.retired != known.retired:
            self._restart_retired(event.model)
        self._end_unreachable(event.model)

    def _room_seen(self, event: RoomSeen) -> None:
        self.admission.payload_bytes_max = event.payload_bytes_max
        self._look_at_room()

    def _storing_failed(self, event: StoringFailed) -> None:
        for each in event.requests:
            self._store_end(each)

    # ------------------------------------------------------------------------------------------ questions

    def is_full(self) -> bool:
        """Tell whether payloads let no group begin, and each that has begun has ended: only `done` makes room then."""
        if self.admission.is_held_back:
            # Since the last look something may have been done.
            self._look_at_room()
        # Before all runners have reported, a group that has begun may look as if it had not.
        return self.fleet.has_gathered and self.admission.is_held_back and not self.admission.begun

    def meter(self, model: str) -> StepMeter:
        """Return what is measured of a model's steps."""
        return self._meters.setdefault(model, StepMeter())

    def context_of(self, of: RequestId) -> int:
        """Return how many tokens an open request has, those of its prompt among them."""
        submission = self.state.submissions[of.submission]
        group = submission.groups[submission.requests[of.index].group]
        return group.prompt_tokens + (self._held(of) or self._stored_count(of))

    def is_due(self, of: RequestId) -> bool:
        """Tell whether an open request was submitted before the newest version was published."""
        request = self.requests[of]
        return request.step < self._steps.get(request.model, 0)

    def policy_of(self, model: str) -> str:
        """Return how requests of a model are placed: as the trainer wants it that has attached last."""
        consumers = [each for each in self.state.consumers.values() if each.model == model]
        return max(consumers, key=lambda each: each.attachment).policy if consumers else DEFAULT_POLICY

    def priority_of(self, of: RequestId) -> int:
        """Return the priority of an open request: the higher, the sooner it begins."""
        submission = self.state.submissions[of.submission]
        return submission.groups[submission.requests[of.index].group].priority

    def has_begun_group(self, of: RequestId) -> bool:
        """Tell whether the group of an open request counts as begun, where payloads have a limit."""
        return self._group_of(of) in self.admission.begun

    def seen_of(self, model: str) -> VersionsSeen:
        """Return what the hub has of a model's versions, as far as this leader has seen it."""
        return self._hub.get(model, VersionsSeen(model, _NO_VERSIONS))

    def step_s(self) -> float:
        """Return how long the longest of the models' last steps was, in seconds; 0: none was seen whole."""
        return max((each.last.whole_s for each in self._meters.values() if each.last is not None), default=0.0)

    def view(self, model: str) -> FleetView:
        """Return what a policy sees of a model's requests and instances."""
        waiting: Collection[RequestId] = self.waiting.of_model(model) if self.fleet.has_gathered else ()
        is_whole = self.fleet.has_gathered and not self.admission.is_held_back
        if self.admission.is_held_back:
            waiting = tuple(of for of in waiting if self._group_of(of) in self.admission.begun)
        rule, hub = self._rule_of(model), self.seen_of(model)
        return FleetView(
            waiting,
            self._shown_instances(model),
            self._steps.get(model, 0),
            frozenset(self._alone),
            self.pinned.versions,
            {
                version: count
                for version, count in self.pinned.demand(model).items()
                if version is None or not hub.versions.is_retired(version)
            },
            max(hub.versions.published, default=None),
            hub.available,
            hub.kept,
            drops_cache=rule is not None and rule.on_update in {"continue", "restart"},
            waiting_since=partial(self.waiting.since, model) if is_whole else None,
        )

    def _rule_of(self, model: str) -> VersionRule | None:
        """Return by which rule requests begin, as far as it is known; None: it is not.

        It is that of the prompt that was loaded last. Once its consumer has nothing open, those of others may be laxer.
        """
        if model not in self._rules:
            return None
        name, attachment, rule = self._rules[model]
        consumer = self.state.consumers.get(name)
        if consumer is None or consumer.attachment != attachment:
            return None
        others = (each for other, each in self.state.consumers.items() if other != name and each.model == model)
        return rule if consumer.open or not any(each.open for each in others) else None

    def _shown_instances(self, model: str) -> tuple[InstanceView, ...]:
        """Return what a policy sees of a model's instances: the same objects again of those that have not changed."""
        rule, versions, arrivals = self._rule_of(model), self._versions_of(model), self._arrivals_of(model)
        has_gathered, alone, now = self.fleet.has_gathered, self._alone, self._now
        of_all = rule, versions, has_gathered, bool(alone)
        is_otherwise = self._shown_for.get(model) != of_all
        self._shown_for[model] = of_all
        newest = max(versions.published, default=-1)
        later = PublishedVersions(versions.seq, (*versions.published, newest + 1), versions.retired)
        stays = VersionRule(staleness=min(0 if rule is None else rule.staleness, STAYS_BEHIND_MAX))
        may: dict[int | None, tuple[bool, bool]] = {}
        instances = []
        for each in self.fleet.of_model(model):
            pending, executing, version, shown = each.pending.shown(), each.executing.shown(), each.version, each.shown
            arrives_in_s = arrivals.arrives_in_s(each.runner, version, now)
            # A request that is tried alone keeps others from an instance, whatever else is the same there.
            if (
                shown is None
                or is_otherwise
                or alone
                or shown.pending is not pending
                or shown.executing is not executing
                or shown.arrives_in_s != arrives_in_s
            ):
                if version not in may:
                    may_start = rule is None or version is None or rule.allows(version, versions)
                    seen = later if version == newest else versions
                    may_stay = version is not None and stays.allows(version, seen)
                    may[version] = may_start, may_stay
                # By position: by name it takes twice as long, for thousands of instances.
                shown = each.shown = InstanceView(
                    each.runner,
                    each.slots,
                    pending,
                    executing,
                    each.takes_more and not each.awaits_version and not self._is_reserved(each),
                    each.is_leaving,
                    version,
                    each.keeps_versions and each.has_reported and has_gathered,
                    each.version_wanted,
                    *may[version],
                    arrives_in_s,
                    each.is_local,
                )
            instances.append(shown)
        return tuple(instances)

    # ------------------------------------------------------------------------------------------ placing

    def _place(self, event: Place) -> None:
        of, runner = event.request, event.runner
        request, instance = self.requests.get(of), self.instances.get(runner)
        if not self.fleet.has_gathered or request is None or not request.is_waiting:
            return
        if instance is None or not instance.takes_more or instance.model != self._model_of(of):
            return
        if self._is_reserved(instance) or (of in self._alone and instance.pending):
            return
        if not self.admission.admit(self._group_of(of)):
            return
        self._n += 1
        self.counts.attempts += 1
        response = self.responses.get(of)
        attempt = Attempt(self.term, self._n)
        began_at = self._stored_count(of) if response is None else response.count
        request.placement = Placement(
            of, attempt, runner, began_at, self._tokens_max(of), placed_at=self._now, reason=event.reason
        )
        self.placements[attempt] = request.placement
        instance.attempts.add(attempt)
        instance.pending.add(of)
        self.waiting.discard(of)
        if response is None and began_at:
            self._effects.append(LoadPrefix(of))
            return
        self.responses.setdefault(of, Response())
        self._effects.append(LoadPrompt(of))

    def _is_reserved(self, instance: Instance) -> bool:
        """Tell whether an instance is trying a request alone."""
        return bool(self._alone) and not self._alone.isdisjoint(instance.pending)

    def _group_of(self, of: RequestId) -> GroupId:
        return of.submission, self.state.submissions[of.submission].requests[of.index].group

    def _look_at_room(self) -> None:
        """Let no further group begin where payloads are nearly full; a group that has begun finishes."""
        counted = self.requests if self.admission.payload_bytes_max else ()
        self.admission.look(self._group_of(of) for of in counted if self._has_begun(of))

    def _has_begun(self, of: RequestId) -> bool:
        """Tell whether a request's group has begun, as far as this request and those that have ended tell."""
        submission, index = self._group_of(of)
        group = self.state.submissions[submission].groups[index]
        if 0 < group.open < group.size or self.requests[of].placement is not None:
            return True
        return bool(self._held(of) or self._stored_count(of))

    def _model_of(self, of: RequestId) -> str:
        return self.state.consumers[self.state.submissions[of.submission].consumer].model

    def _arrivals_of(self, model: str) -> VersionArrivals:
        return self._arrivals.setdefault(model, VersionArrivals())

    def _versions_of(self, model: str) -> PublishedVersions:
        return self.versions.get(model, _NO_VERSIONS)

    def _tokens_max(self, of: RequestId) -> int:
        submission = self.state.submissions[of.submission]
        return submission.groups[submission.requests[of.index].group].tokens_max

    def _stored_count(self, of: RequestId) -> int:
        stored = self.state.request(of)
        return 0 if stored is None else stored.kept

    def _prefix_loaded(self, event: PrefixLoaded) -> None:
        request = self.requests.get(event.request)
        if request is None or request.placement is None or event.request in self.responses:
            return
        stored = self.state.request(event.request)
        attempt = None if stored is None else stored.attempt
        versions = self._versions_of(self._model_of(event.request))
        if any(versions.is_retired(run.version) for run in event.runs):
            # The trainer has gone back behind these tokens.
            request.placement.began_at = 0
            self.counts.discarded["rewind"] += len(event.tokens) // TOKEN_BYTES
            self.responses[event.request] = Response(attempt=attempt, dropped=attempt)
        else:
            self.responses[event.request] = Response(
                bytearray(event.tokens), bytearray(event.logprobs), list(event.runs), attempt
            )
        self._effects.append(LoadPrompt(event.request))

    def _prompt_loaded(self, event: PromptLoaded) -> None:
        request = self.requests.get(event.request)
        if request is None or request.placement is None:
            return
        placement = request.placement
        request.age_max, request.newest = event.age_max, event.newest
        if event.rule.pinned is None:
            consumer = self.state.submissions[event.request.submission].consumer
            attachment = self.state.consumers[consumer].attachment
            self._rules[request.model] = consumer, attachment, event.rule
        if placement.state is AttemptState.PREPARED:
            placement.move(AttemptTransition.LOADED)
            # Tokens that do not count end nothing. How old they may be is known only here.
            void = request.void or self._why_void(event.request)
            reason = None if void else event.sampling.ended_by(self.responses[event.request].tokens)
            if reason is not None:
                # Its runner was lost before it could say so.
                response = self.responses[event.request]
                request.ending = RequestEnded(event.request, response.attempt, reason, response.count)
            instance = self.instances[placement.runner]
            versions = self._versions_of(instance.model)
            is_allowed = instance.version is not None and event.rule.allows(instance.version, versions)
            if reason is not None or void or not is_allowed:
                request.void = void
                placement.move(AttemptTransition.REFUSED)
                self._over(placement)
                if reason is not None:
                    self._store_end(event.request)
                return
        if placement.state is AttemptState.ASSIGNED:
            self._send_assign(placement, event)
        elif placement.state is AttemptState.HELD and placement.finished is None and self._is_too_old(event.request):
            self._restart(event.request, "age")

    def _loading_failed(self, event: LoadingFailed) -> None:
        request = self.requests.get(event.request)
        if request is None or request.placement is None or request.placement.state is not AttemptState.PREPARED:
            return
        request.placement.move(AttemptTransition.CLOSED)
        self._drop(request.placement)
        request.placement = None
        request.ending = RequestEnded(event.request, None, "failed", 0, event.error)
        self._store_end(event.request)

    def _send_assign(self, placement: Placement, said: PromptLoaded) -> None:
        """Send the part of the prefix behind what the runner has confirmed."""
        instance, response = self.instances[placement.runner], self.responses[placement.request]
        room = max(1, self.limits.assign_tokens_max - len(said.prompt) // TOKEN_BYTES)
        first = TOKEN_BYTES * placement.confirmed
        last = min(TOKEN_BYTES * (placement.confirmed + room), TOKEN_BYTES * placement.began_at)
        rule = said.rule
        if self.requests[placement.request].restarts >= self.limits.restarts_max and rule.on_update == "restart":
            rule = msgspec.structs.replace(rule, on_update="continue")
        assign = Assign(
            placement.request,
            placement.attempt,
            said.prompt,
            said.sampling,
            rule,
            placement.began_at,
            placement.confirmed,
            bytes(response.tokens[first:last]),
            bytes(response.logprobs[first:last]),
            tuple(response.runs),
        )
        self._note_asked(placement)
        versions = self._versions_of(instance.model)
        request = AssignRequest(self.log, self.term, instance.incarnation, versions, (assign,))
        self._effects.append(SendAssign(placement.runner, request))

    def _assign_answered(self, event: AssignAnswered) -> None:
        if not self.fleet.known(event.runner, event.incarnation):
            return
        for result in event.results:
            placement = self.placements.get(result.attempt)
            if placement is None or placement.runner != event.runner or placement.state is not AttemptState.ASSIGNED:
                continue
            if result.refused is not None:
                placement.move(AttemptTransition.REFUSED)
                self._over(placement)
            elif result.held >= placement.began_at:
                self._confirmed(placement)
            else:
                placement.confirmed = max(placement.confirmed, result.held)
                self._effects.append(LoadPrompt(placement.request))

    def _confirmed(self, placement: Placement) -> None:
        placement.move(AttemptTransition.CONFIRMED)
        self._note_answered(placement)
        self._forget_earlier(placement.request)

    def _forget_earlier(self, of: RequestId) -> None:
        """Let the runners of earlier attempts forget what a later one holds."""
        request = self.requests[of]
        for attempt, runner in request.unforgotten.items():
            self._forget(runner, attempt)
        request.unforgotten.clear()

    def _forget(self, runner: str, attempt: Attempt) -> None:
        instance = self.instances.get(runner)
        if instance is not None:
            instance.to_forget[attempt] = None

    def _want(self, event: Want) -> None:
        """Tell an instance with each answer to a heartbeat what to have, from now on."""
        instance = self.instances.get(event.runner)
        # Before all runners have reported it is not known who has what.
        if instance is not None and instance.keeps_versions and self.fleet.has_gathered:
            instance.version_wanted = event.version
            self.fleet.note_changed(instance)
            self._end_unreachable(instance.model)

    def _end_seeding(self, event: EndSeeding) -> None:
        """Tell the trainer's own engine with each answer to a heartbeat that it may stop, from now on."""
        instance = self.instances.get(event.runner)
        if instance is not None and instance.is_local:
            instance.is_enough = True

    # ------------------------------------------------------------------------------------------ stopping

    def _withdraw(self, event: Withdraw) -> None:
        request = self.requests.get(event.request)
        placement = None if request is None else request.placement
        if placement is None or placement.state not in {AttemptState.ASSIGNED, AttemptState.HELD}:
            return
        placement.moves_to, placement.withdrawn_why = event.target, event.reason
        placement.move(AttemptTransition.WITHDRAWN)
        _note_idle(self.instances[placement.runner], placement)
        self._send_stop(placement)

    def _send_stop(self, placement: Placement) -> None:
        self._note_asked(placement)
        instance = self.instances[placement.runner]
        stop = AbortRequest(self.log, self.term, instance.incarnation, stop=(placement.attempt,))
        self._effects.append(SendAbort(placement.runner, stop))

    def _abort_answered(self, event: AbortAnswered) -> None:
        instance = self.fleet.known(event.runner, event.incarnation)
        if instance is None:
            return
        for attempt in event.forgotten:
            instance.to_forget.pop(attempt, None)
        for result in event.stopped:
            placement = self.placements.get(result.attempt)
            if placement is None or placement.runner != event.runner or placement.state is not AttemptState.STOPPING:
                continue
            if result.tokens is None:
                # It never began: its assign was lost, and can't begin it any more.
                placement.move(AttemptTransition.STOPPED)
                self._over(placement)
                self._go_on(placement)
            else:
                placement.stopped_at = result.tokens
                self._note_asked(placement)
                self._look_whether_over(placement)

    def _look_whether_over(self, placement: Placement) -> bool:
        """End the attempt if all of its tokens are here; tell whether it ended."""
        if placement.state is AttemptState.COMPLETE:
            return True
        held = self._held(placement.request)
        if placement.finished is not None and held >= placement.finished.tokens:
            self._finished(placement, placement.finished)
            return True
        if placement.state is not AttemptState.STOPPING or placement.stopped_at is None or held < placement.stopped_at:
            return False
        placement.move(AttemptTransition.STOPPED)
        self._over(placement)
        self._go_on(placement)
        return True

    def _go_on(self, placement: Placement) -> None:
        """Place a request where its stopped attempt was to go."""
        if placement.moves_to is not None:
            self._place(Place(placement.request, placement.moves_to, placement.withdrawn_why))

    def _held(self, of: RequestId) -> int:
        response = self.responses.get(of)
        return 0 if response is None else response.count

    def _finished(self, placement: Placement, finished: Finished) -> None:
        if placement.state is AttemptState.ASSIGNED:
            # The answer to its assign was lost; it could not end without the whole prefix.
            self._confirmed(placement)
        reason = finished.reason
        why: DiscardReason = "restart"
        if reason in {"stop", "length"} and (void := self._why_void(placement.request)) is not None:
            reason, why = "restart", void
        match reason:
            case "stop" | "length":
                placement.move(AttemptTransition.COMPLETED)
                placement.completed_at = self._now
                _note_idle(self.instances.get(placement.runner), placement)
                self._note_answered(placement)
                self._store_end(placement.request)
            case "restart" | "superseded" | "failed":
                if placement.state is AttemptState.HELD:
                    placement.move(AttemptTransition.WITHDRAWN)
                placement.move(AttemptTransition.STOPPED)
                if reason == "restart":
                    self._begin_anew(placement.request, placement.attempt, why)
                self._over(placement, finished.error if reason == "failed" else None)
                if reason == "restart":
                    # Its tokens are not wanted again.
                    self.requests[placement.request].unforgotten.pop(placement.attempt, None)
                    self._forget(placement.runner, placement.attempt)

    def _begin_anew(self, of: RequestId, attempt: Attempt | None, why: DiscardReason) -> None:
        """Drop the tokens of a request: they are made again by a later attempt."""
        request = self.requests[of]
        request.void = None
        request.restarts += why != "rewind"
        self.counts.discarded[why] += self._held(of)
        self.responses[of] = Response(attempt=attempt, dropped=attempt)

    def _why_void(self, of: RequestId) -> DiscardReason | None:
        """Say why the tokens of a request do not count; None: they do."""
        if self._has_retired(of):
            return "rewind"
        return "age" if self._is_too_old(of) else None

    def _is_too_old(self, of: RequestId) -> bool:
        """Tell whether a response is to begin anew because its oldest token is too old; that happens once.

        One that is for a version alone would begin anew on the same one, so it does not.
        """
        request, runs = self.requests[of], self.responses[of].runs
        if request.age_max is None or request.restarts or of in self.pinned.versions or not runs:
            return False
        oldest = min(run.version for run in runs)
        return self._versions_of(request.model).newer_than(oldest) > request.age_max

    def _restart_too_old(self, model: str) -> None:
        """Begin responses anew that have become too old: what they would still make would be dropped at their end."""
        for of in [*self.responses]:
            if self.requests[of].model == model and self._is_too_old(of):
                self._restart(of, "age")

    def _restart_retired(self, model: str) -> None:
        """Begin responses anew that have tokens of versions which the trainer has gone back behind."""
        if not self._versions_of(model).retired:
            return
        for of in [*self.responses]:
            if self._model_of(of) == model and self._has_retired(of):
                self._restart(of, "rewind")

    def _has_retired(self, of: RequestId) -> bool:
        """Tell whether a response has tokens of a version that the trainer has gone back behind."""
        versions = self._versions_of(self._model_of(of))
        return bool(versions.retired) and any(versions.is_retired(run.version) for run in self.responses[of].runs)

    def _restart(self, of: RequestId, why: DiscardReason) -> None:
        """Begin a response anew once its attempt has stopped, unless it has ended."""
        request = self.requests[of]
        if request.ending is not None or _is_complete(request.placement):
            return
        if request.placement is None:
            self._begin_anew(of, self.responses[of].attempt, why)
        else:
            request.void = why
            self._withdraw(Withdraw(of, None, _WHY_ANEW[why]))

    def _store_end(self, of: RequestId) -> None:
        """Have the end of a request written; where it was written already, the log takes the first."""
        request = self.requests.get(of)
        if request is None:
            return
        response, ended = self.responses.setdefault(of, Response()), request.ending
        placement = request.placement
        if placement is not None and placement.state is AttemptState.COMPLETE and placement.finished is not None:
            reason: ManagerEndReason = "stop" if placement.finished.reason == "stop" else "length"
            ended = RequestEnded(of, placement.attempt, reason, response.count)
        if ended is not None:
            self._effects.append(
                StoreEnd(ended, bytes(response.tokens), bytes(response.logprobs), tuple(response.runs))
            )

    def _over(self, placement: Placement, failure: str | None = None, *, is_blamed: bool = True) -> None:
        """An attempt is over and its request waits again; after too many failures without a new token it ends.

        A failure for which the request is not blamed is told, and does not count.
        """
        of = placement.request
        self._drop(placement)
        request = self.requests[of]
        request.note_past(PastAttempt.of(placement, self._held(of), self._now, failure))
        request.placement = None
        request.unforgotten[placement.attempt] = placement.runner
        if request.void is not None:
            self._begin_anew(of, placement.attempt, request.void)
        held = self._held(of)
        if held > placement.began_at:
            request.fruitless = request.lost_together = 0
            self._alone.discard(of)
        elif failure is not None and is_blamed:
            request.fruitless += 1
        if request.fruitless >= self.limits.attempts_max:
            error = f"{request.fruitless} attempts one after the other made no token; the last one: {failure}"
            request.ending = RequestEnded(of, placement.attempt, "failed", held, error)
            self._store_end(of)
        elif request.is_waiting:
            self._queue(of)

    def _open(self, of: RequestId) -> None:
        """Take a request that is open in the log."""
        model = self._model_of(of)
        # What was there before this leader counts as of the first step that it sees: due from the next one on.
        self.requests[of] = OpenRequest(model, max(1, self._steps.get(model, 0)))
        submission = self.state.submissions[of.submission]
        self.pinned.open(of, model, submission.groups[submission.requests[of.index].group].version)
        self._queue(of)

    def _queue(self, of: RequestId) -> None:
        """Have a request wait for a placement, or end where no instance can ever take it."""
        submission = self.state.submissions[of.submission]
        group = submission.groups[submission.requests[of.index].group]
        response = self.responses.get(of)
        has_begun = bool(self._stored_count(of) if response is None else response.count)
        self.waiting.put(of, self._model_of(of), group.priority, has_begun=has_begun)
        if of in self.pinned.versions:
            self._end_unreachable(self._model_of(of), (of,))

    def _drop(self, placement: Placement) -> None:
        del self.placements[placement.attempt]
        self._note_answered(placement)
        instance = self.instances.get(placement.runner)
        if instance is not None and placement.attempt in instance.attempts:
            instance.attempts.discard(placement.attempt)
            _note_idle(instance, placement)

    # ------------------------------------------------------------------------------------------ the log

    def _entry_folded(self, event: EntryFolded) -> None:
        match event.outcome:
            case Submitted(opened=opened):
                for of in opened:
                    self._open(of)
            case Ended(requests=gone) | Cancelled(requests=gone) | Attached(dropped=gone):
                for of in gone:
                    self.lengths.ended(of)
                    self._close(of)
            case Acknowledged(requests=done):
                for of in done:
                    self.ended.pop(of, None)
            case _:
                pass

    def _close(self, of: RequestId) -> None:
        """The log has the request's end: the runners of its attempts forget them."""
        request = self.requests.pop(of)
        if self.state.request(of) is not None:
            self.ended[of] = request.attempts(self._held(of), self._now)
            if len(self.ended) > ENDED_MAX:
                del self.ended[next(iter(self.ended))]
        self.pinned.close(of, request.model)
        self._alone.discard(of)
        self.waiting.discard(of)
        self.responses.pop(of, None)
        for attempt, runner in request.unforgotten.items():
            self._forget(runner, attempt)
        placement = request.placement
        if placement is not None:
            placement.move(AttemptTransition.CLOSED)
            self._drop(placement)
            self._forget(placement.runner, placement.attempt)

    def _end_unreachable(self, model: str, among: Iterable[RequestId] | None = None) -> None:
        """End what waits for a version alone that is gone.

        `among`: of these pinned requests alone. A submission of thousands is judged one by one.
        """
        pinned, hub = self.pinned.versions, self._hub.get(model)
        if not pinned or not self.fleet.has_gathered or hub is None:
            return
        instances = self.fleet.of_model(model)
        there = hub.available if hub.hold is None else hub.available | hub.hold.coming
        # By version, and not by request: what the hub has changes with each instance that changes its version.
        judged = {
            version: why_gone(version, hub.versions, there, instances)
            for version in self.pinned.demand(model)
            if version is not None
        }
        if not any(judged.values()):
            return
        for of in [*(pinned if among is None else among)]:
            error = judged.get(pinned[of])
            if error is None or of not in self.waiting or self.requests[of].model != model:
                continue
            self.waiting.discard(of)
            response = self.responses.get(of)
            count = 0 if response is None else response.count
            attempt = None if response is None else response.attempt
            self.requests[of].ending = RequestEnded(of, attempt, "failed", count, error)
            self._store_end(of)

    # ------------------------------------------------------------------------------------------ runners

    def _heard(self, runner: str, log: str, incarnation: int) -> Instance | None:
        """Return the instance of a runner that says something, known or not; None: its process was replaced."""
        instance = self.instances.get(runner)
        if log != self.log or (instance is not None and incarnation < instance.incarnation):
            return None
        if instance is not None and incarnation > instance.incarnation:
            self._lose(instance, "it began anew")
        return self.fleet.heard(runner, incarnation)

    def _heartbeat(self, event: HeartbeatCame) -> None:
        beat = event.beat
        instance = self._heard(event.runner, beat.log, beat.incarnation)
        if instance is None:
            if beat.log < self.log:
                self._effects.append(AnswerHeartbeat(HeartbeatResult(self.log, self.term, _NO_VERSIONS)))
            return
        if beat.steps != instance.steps or not instance.attempts:
            instance.stepped_at = self._now
        instance.steps = beat.steps
        before = _told(instance)
        instance.model, instance.slots, instance.keeps_versions = beat.model, beat.slots, beat.keeps_versions
        instance.is_leaving, instance.is_local = beat.is_leaving, beat.is_local
        self._arrivals_of(beat.model).heard(event.runner, instance.version, beat.version, beat.loads_in_s, self._now)
        if beat.version != instance.version:
            instance.version = beat.version
            self._end_unreachable(beat.model)
        if _told(instance) != before:
            self.fleet.note_changed(instance)
        instance.measured.extend(beat.measured)
        if beat.measured and self._now - instance.fitted_at >= self.limits.fitted_s:
            # Here, and not in a look of the policies: those would fit all instances at once.
            instance.fitted_at, instance.step_model = self._now, fitted(instance.measured)
        versions = self._versions_of(beat.model)
        flush_s = len(self.instances) / self.limits.frames_per_s_max
        wants_report, wanted = not instance.has_reported, instance.version_wanted
        result = HeartbeatResult(
            self.log, self.term, versions, wants_report, flush_s, wanted, is_enough=instance.is_enough
        )
        self._effects.append(AnswerHeartbeat(result))

    def _report(self, event: ReportCame) -> None:
        runner, report = event.runner, event.report
        instance = self._heard(runner, report.log, report.incarnation)
        if instance is None:
            return
        forget, resend = [], []
        for held in report.held:
            request = self.requests.get(held.request)
            if request is None or held.attempt in instance.to_forget or self._is_outdated(request, held):
                forget.append(held.attempt)
            elif (placement := self._placement_of(runner, request, held)) is not None:
                resend.append((held.attempt, self._held(held.request)))
                self._look_whether_over(placement)
        instance.has_reported = True
        self.fleet.note_changed(instance)
        self._forget_unreported(instance, report)
        self._effects.append(AnswerReport(ReportResult(self.log, self.term, tuple(forget), tuple(resend))))

    def _is_outdated(self, request: OpenRequest, held: HeldAttempt) -> bool:
        """Tell whether a later attempt has all that this one has."""
        placement, highest = request.placement, self._highest(held.request)
        if highest is not None and held.attempt < highest:
            return True
        if placement is None or held.attempt >= placement.attempt:
            return False
        return placement.state not in {AttemptState.PREPARED, AttemptState.ASSIGNED}

    def _placement_of(self, runner: str, request: OpenRequest, held: HeldAttempt) -> Placement | None:
        """Return the placement of an attempt, adopting it where nothing later is known; None: it stays as it is."""
        placement = request.placement
        if placement is not None and placement.attempt == held.attempt:
            if placement.state is AttemptState.ASSIGNED:
                self._confirmed(placement)
            return placement
        if placement is not None and placement.attempt > held.attempt:
            request.unforgotten[held.attempt] = runner
            return None
        response = self.responses.get(held.request)
        is_here = response is not None and response.attempt == held.attempt and response.count >= held.tokens
        if request.ending is not None or (held.state == "stopped" and is_here):
            request.unforgotten[held.attempt] = runner
            return None
        return self._adopt(runner, request, held)

    def _highest(self, of: RequestId) -> Attempt | None:
        stored, response = self.state.request(of), self.responses.get(of)
        known = [
            each
            for each in (None if stored is None else stored.attempt, None if response is None else response.attempt)
            if each is not None
        ]
        return max(known, default=None)

    def _adopt(self, runner: str, request: OpenRequest, held: HeldAttempt) -> Placement:
        before = request.placement
        if before is not None:
            before.move(AttemptTransition.CLOSED)
            self._drop(before)
            self._forget(before.runner, before.attempt)
        response = self.responses.get(held.request)
        if response is None or response.attempt != held.attempt:
            stored = self.state.request(held.request)
            known = None if stored is None or stored.attempt == held.attempt else stored.attempt
            self.responses[held.request] = Response(attempt=held.attempt, dropped=known)
        placement = Placement(
            held.request,
            held.attempt,
            runner,
            self._held(held.request),
            self._tokens_max(held.request),
            placed_at=self._now,
            reason=_ADOPTED,
        )
        placement.move(AttemptTransition.ADOPTED)
        request.placement = self.placements[held.attempt] = placement
        request.unforgotten.pop(held.attempt, None)
        self.waiting.discard(held.request)
        self.instances[runner].attempts.add(held.attempt)
        if held.state == "stopped":
            placement.move(AttemptTransition.WITHDRAWN)
            placement.stopped_at = held.tokens
        else:
            self.instances[runner].pending.add(held.request)
        # How old it may be is known only then.
        self._effects.append(LoadPrompt(held.request))
        return placement

    def _forget_unreported(self, instance: Instance, report: Report) -> None:
        """What a runner was to have and does not report never came, or is gone."""
        reported = {each.attempt for each in report.held}
        for attempt in [*instance.to_forget]:
            if attempt not in reported:
                del instance.to_forget[attempt]

    # ------------------------------------------------------------------------------------------ tokens

    def _frame(self, event: FrameCame) -> None:
        runner, frame = event.runner, event.frame
        instance = self._heard(runner, frame.log, frame.incarnation)
        if instance is None:
            return
        if not is_well_formed(frame):
            self._lose(instance, f"its frame {frame.number} can't be read")
            return
        finished = []
        for each in frame.finished:
            placement = self.placements.get(each.attempt)
            if placement is not None and placement.runner == runner:
                # Before the tokens: with the last of them the attempt is over.
                placement.finished = each
                instance.streaming.pop(attempt_key(each.attempt), None)
                finished.append(placement)
        if frame.tokens and not instance.is_local:
            self.meter(instance.model).last_token_at = self._now
        resend, is_unknown = self._take_rows(instance, frame)
        for placement in finished:
            if placement.attempt in self.placements and not self._look_whether_over(placement):
                resend.append((placement.attempt, self._held(placement.request)))
        self._effects.append(
            AnswerFrame(
                FrameResult(self.log, self.term, frame.number, tuple(resend), is_unknown or not instance.has_reported)
            )
        )

    def _take_rows(self, instance: Instance, frame: Frame) -> tuple[list[tuple[Attempt, int]], bool]:
        """Take the rows of a frame; return what to send again, and whether an attempt is unknown.

        Nearly all rows are of attempts that have made tokens and go on, and begin where the last one ended: these only
        grow their response.
        """
        resend: list[tuple[Attempt, int]] = []
        is_unknown = False
        streaming = instance.streaming
        runs: dict[Attempt, list[TokenRun]] = {}
        for attempt, run in frame.runs:
            runs.setdefault(attempt, []).append(run)
            streaming.pop(attempt_key(attempt), None)
        tokens, logprobs, at = memoryview(frame.tokens), memoryview(frame.logprobs), 0
        columns = (memoryview(column).cast("q") for column in (frame.attempts, frame.starts, frame.counts))
        for key, start, count in zip(*columns, strict=True):
            end = at + TOKEN_BYTES * count
            stream = streaming.get(key)
            if stream is not None:
                response, tokens_max = stream
                if TOKEN_BYTES * start == len(response.tokens) and start + count <= tokens_max:
                    response.tokens += tokens[at:end]
                    response.logprobs += logprobs[at:end]
                    instance.tokens += count
                    at = end
                    continue
            attempt = attempt_of(key)
            placement = self.placements.get(attempt)
            if placement is None or placement.runner != instance.runner:
                is_unknown = is_unknown or attempt not in instance.to_forget
            elif not self._take(placement, start, tokens[at:end], logprobs[at:end], runs.get(attempt, ())):
                resend.append((attempt, self.responses[placement.request].count))
            else:
                instance.tokens += count
            at = end
        return resend, is_unknown

    def _take(
        self, placement: Placement, start: int, tokens: memoryview, logprobs: memoryview, runs: Iterable[TokenRun]
    ) -> bool:
        if placement.state is AttemptState.ASSIGNED:
            # It could not make tokens without the whole prefix.
            self._confirmed(placement)
        if placement.state is AttemptState.COMPLETE:
            return True
        response = self.responses[placement.request]
        if start + len(tokens) // TOKEN_BYTES > placement.tokens_max:
            self._lose(
                self.instances[placement.runner], f"it made more than {placement.tokens_max} tokens of a response"
            )
            return True
        try:
            if not response.take(start, tokens, logprobs):
                return False
        except TokensDiffer as why:
            self._lose(self.instances[placement.runner], str(why))
            return True
        response.attempt = placement.attempt
        self._take_runs(placement, response, runs)
        self._note_progress(placement, response)
        if placement.state is AttemptState.STOPPING or placement.finished is not None:
            self._look_whether_over(placement)
        return True

    def _take_runs(self, placement: Placement, response: Response, runs: Iterable[TokenRun]) -> None:
        is_new = False
        for run in runs:
            if run.start < response.count:
                response.add_run(run)
                is_new = True
        # They may have been under way when this leader heard of a rewind, or of newer versions.
        if is_new and placement.finished is None and (why := self._why_void(placement.request)) is not None:
            self._restart(placement.request, why)

    def _note_progress(self, placement: Placement, response: Response) -> None:
        """Note that an attempt executes once it has made a token."""
        instance = self.instances[placement.runner]
        if placement.request in instance.pending and response.count > placement.began_at:
            instance.pending.discard(placement.request)
            instance.executing.add(placement.request)
            placement.first_token_at = self._now
        if placement.request in instance.executing and placement.finished is None:
            instance.streaming[attempt_key(placement.attempt)] = (response, placement.tokens_max)

    # ------------------------------------------------------------------------------------------ time

    def _note_asked(self, placement: Placement) -> None:
        placement.asked_at = self._now
        self._asked[placement.attempt] = placement

    def _note_answered(self, placement: Placement) -> None:
        placement.asked_at = None
        self._asked.pop(placement.attempt, None)

    def _on_time(self) -> None:
        limits = self.limits
        if self.fleet.gather():
            for model in self.fleet.models():
                self._end_unreachable(model)
        for instance, reason in self.fleet.silent():
            self._lose(instance, reason)
        for placement in [*self._asked.values()]:
            if placement.asked_at is not None and self._now - placement.asked_at >= limits.resend_s:
                self._ask_again(placement)
        for instance in self.instances.values():
            self._ask_to_forget(instance)
        for model, meter in self._meters.items():
            meter.see_fleet(self.fleet.remote_of(model))
        if self.fleet.count_rates(limits.rate_s):
            self._look_at_room()
        # A few at a look, so that frames don't wait for the tokens of the whole fleet.
        looks = limits.checkpoint_s / limits.look_s
        for instance in self.fleet.due_to_checkpoint(limits.checkpoint_s)[: 1 + int(2 * len(self.instances) / looks)]:
            instance.checkpointed_at = self._now
            self._checkpoint(instance)

    def _ask_again(self, placement: Placement) -> None:
        self._note_asked(placement)
        if placement.state is AttemptState.ASSIGNED:
            self._effects.append(LoadPrompt(placement.request))
        elif placement.state is AttemptState.STOPPING:
            self._send_stop(placement)

    def _ask_to_forget(self, instance: Instance) -> None:
        if not instance.to_forget:
            instance.asked_to_forget_at = None
        elif instance.asked_to_forget_at is None or self._now - instance.asked_to_forget_at >= self.limits.resend_s:
            instance.asked_to_forget_at = self._now
            forget = AbortRequest(self.log, self.term, instance.incarnation, forget=tuple(instance.to_forget))
            self._effects.append(SendAbort(instance.runner, forget))

    def _lose(self, instance: Instance, reason: str) -> None:
        """Take an instance for lost: its requests go on elsewhere from what is held."""
        if not self.fleet.remove(instance.runner):
            return
        # What has said that it leaves, and has nothing, may go.
        is_left = instance.is_leaving and not instance.attempts
        if not is_left:
            self.counts.instances_lost += 1
            self.counts.tokens_of_lost += instance.tokens
        self._effects.append(InstanceLost(instance.runner, reason, is_left=is_left))
        self._arrivals_of(instance.model).lost(instance.runner)
        placements = [self.placements[attempt] for attempt in sorted(instance.attempts)]
        blamed = self._blamed(placements)
        for placement in placements:
            if placement.state is not AttemptState.COMPLETE:
                placement.move(AttemptTransition.LOST)
                self._over(placement, f"{instance.runner} was lost: {reason}", is_blamed=placement in blamed)
        # It may have been the last with its version.
        self._end_unreachable(instance.model)

    def _blamed(self, lost: list[Placement]) -> list[Placement]:
        """Return the attempt that may have cost the instance, if it is one alone.

        Of several, one may have done it, and the others would fail for it: next time each is tried alone.
        """
        tried = [each for each in lost if each.state in _AT_RUNNER and self._held(each.request) == each.began_at]
        if len(tried) <= 1:
            return tried
        for each in tried:
            request = self.requests[each.request]
            request.lost_together += 1
            if request.lost_together >= self.limits.lost_together_max:
                self._alone.add(each.request)
        return []

    def _checkpoint(self, instance: Instance) -> None:
        """Have the tokens of an instance's attempts written that came since the last checkpoint."""
        for attempt in sorted(instance.attempts):
            placement = self.placements[attempt]
            of = placement.request
            part = checkpoint(placement, self.responses.get(of), self.state.request(of))
            if part is not None:
                self._effects.append(part)


def _told(instance: Instance) -> tuple[object, ...]:
    """Return what heartbeats tell of an instance that policies see."""
    return (
        instance.model,
        instance.slots,
        instance.version,
        instance.is_leaving,
        instance.is_local,
        instance.keeps_versions,
    )


def _is_complete(placement: Placement | None) -> bool:
    return placement is not None and placement.state is AttemptState.COMPLETE


def _note_idle(instance: Instance | None, placement: Placement) -> None:
    """Note that a request is to run no more on an instance."""
    if instance is not None:
        instance.pending.discard(placement.request)
        instance.executing.discard(placement.request)
        instance.streaming.pop(attempt_key(placement.attempt), None)
