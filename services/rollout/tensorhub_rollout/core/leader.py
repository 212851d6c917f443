"""What the leading manager of a job does: places requests, collects their tokens, and ends them. Pure.

It begins once its `lead` is folded, with nothing but the state of the log, and asks runners what they hold. It decides
no placement by itself: a policy says `Place` and `Withdraw`, and what no rule allows is not done.

Its parts, from the lowest to the highest. Each calls only those before it:

| part | what |
|---|---|
| `fleet`, `models` | the instances that it hears, and the versions that it sees |
| `attempts` | attempts that are not over, and what their runners are asked |
| `open_requests` | which requests wait, begin anew, and end |
| `assignments` | from a policy's word to a runner that has the attempt |
| `progress` | from an attempt's first token to its end |
| `reports` | what runners hold that this leader did not give them |

Here is what is of several of them: what runners say of themselves, that instances are lost, what time alone changes,
and what a policy sees.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import (
    FrameResult,
    HeartbeatResult,
    PublishedVersions,
    ReportResult,
    VersionRule,
    is_well_formed,
)
from tensorhub_rollout.core.assignments import Assignments
from tensorhub_rollout.core.attempt_progress import AttemptProgress
from tensorhub_rollout.core.attempts import Attempts
from tensorhub_rollout.core.checkpoints import checkpoint
from tensorhub_rollout.core.event_context import EventContext
from tensorhub_rollout.core.fleet import Fleet
from tensorhub_rollout.core.instance import Instance
from tensorhub_rollout.core.leader_counts import LeaderCounts
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
    Place,
    PrefixLoaded,
    PromptLoaded,
    ReportCame,
    RoomSeen,
    StoringFailed,
    VersionsSeen,
    Want,
    Withdraw,
)
from tensorhub_rollout.core.lengths import ResponseLengths
from tensorhub_rollout.core.model_versions import Models
from tensorhub_rollout.core.open_requests import OpenRequest, OpenRequests
from tensorhub_rollout.core.placement import AttemptState, AttemptTransition, Placement
from tensorhub_rollout.core.reports import Reports
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.log.outcomes import Acknowledged, Attached, Cancelled, Ended, Submitted
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.policy.plateau import fitted
from tensorhub_rollout.policy.request_facts import RequestFacts
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
    prefix_tokens_min: int = 8192
    """Least number of tokens in a part of a prefix, however long the prompt is: each part carries that."""
    attempts_max: int = 5
    """A request fails after this number of attempts one after the other without a new token, while no other request
    was tried on the same instance."""
    lost_together_max: int = 2
    """A request that was lost so often without a new token, together with others, is tried alone on an instance."""
    restarts_max: int = 3
    """A request that was restarted so often goes on with its tokens on the next version."""


STAYS_BEHIND_MAX: Final = 3
"""Limit of the newer versions that an instance lacks which stays on its own, also where a rule allows more."""

_NO_VERSIONS: Final = PublishedVersions(0)


class Leader:
    """The leader of one job under one term."""

    def __init__(self, state: RolloutState, log: str, limits: LeaderLimits, now: float) -> None:
        """Begin; `state` is folded up to this leader's `lead`, and stays folded by the driver."""
        self.state, self.log, self.term, self.limits = state, log, state.term, limits
        self._context = context = EventContext(now)
        self.counts = LeaderCounts()
        self.models = Models()
        self.fleet = Fleet(now, silence_s=limits.silence_s, stall_s=limits.stall_s, gather_s=limits.gather_s)
        self.attempts = Attempts(
            log,
            self.term,
            context,
            self.fleet.instances,
            resend_s=limits.resend_s,
            assign_tokens_max=limits.assign_tokens_max,
            prefix_tokens_min=limits.prefix_tokens_min,
        )
        self.open_requests = OpenRequests(
            state,
            context,
            self.fleet,
            self.models,
            self.attempts,
            self.counts,
            attempts_max=limits.attempts_max,
            lost_together_max=limits.lost_together_max,
            admission_share_max=limits.admission_share_max,
        )
        self._assignments = Assignments(
            state,
            context,
            self.fleet,
            self.models,
            self.attempts,
            self.open_requests,
            self.counts,
            restarts_max=limits.restarts_max,
        )
        self._progress = AttemptProgress(self.fleet, self.attempts, self.open_requests, self._assignments, self._lose)
        self._reports = Reports(state, context, self.attempts, self.open_requests, self._progress)
        self.lengths = ResponseLengths(state, self.open_requests.held)
        self.instances: Final[Mapping[str, Instance]] = self.fleet.instances
        """By runner."""
        self.placements: Final[Mapping[Attempt, Placement]] = self.attempts.placements
        self.requests: Final[Mapping[RequestId, OpenRequest]] = self.open_requests.by_id
        self.responses: Final[Mapping[RequestId, Response]] = self.open_requests.responses
        self.waiting, self.pinned = self.open_requests.waiting, self.open_requests.pinned
        self.admission = self.open_requests.admission
        self._rules: dict[str, tuple[str, int, VersionRule]] = {}
        """By model: the rule of the latest request that is for no version alone, with its consumer and attachment."""
        self._shown_for: dict[str, tuple[object, ...]] = {}
        """By model: what else, beside an instance itself, policies saw in what they saw of it."""
        self._shown: dict[str, tuple[tuple[int, int], tuple[InstanceView, ...]]] = {}
        """By model: what policies saw of instances that stays so until one changes, with how much had changed."""
        self._looked_at = now
        self._handlers: Final[Mapping[type, Callable[[Any], None]]] = {
            AbortAnswered: self._progress.abort_answered,
            AssignAnswered: self._assignments.answered,
            BusChanged: self._bus_changed,
            EndSeeding: self._end_seeding,
            EntryFolded: self._entry_folded,
            FrameCame: self._frame,
            HeartbeatCame: self._heartbeat,
            LoadingFailed: self._assignments.loading_failed,
            Place: self._assignments.place,
            PrefixLoaded: self._assignments.prefix_loaded,
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
        self._context.now = now
        self.fleet.note_time(now)
        if not isinstance(event, Tick):
            self._handlers[type(event)](event)
        if now >= self.deadline():
            self._looked_at = now
            self._on_time()
        return self._context.taken()

    def deadline(self) -> float:
        """Return when time alone may change something."""
        return self._looked_at + self.limits.look_s

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self.fleet.check()
        self.attempts.check(self.requests, self.responses)
        self.open_requests.check()
        for model in self.fleet.models():
            shown = self._shown_instances(model)
            for instance in self.instances.values():
                instance.shown = None
            self._shown.clear()
            assert self._shown_instances(model) == shown

    # ------------------------------------------------------------------------------------------ what a policy sees

    def view(self, model: str) -> FleetView:
        """Return what a policy sees of a model's requests and instances."""
        waiting: Collection[RequestId] = self.waiting.of_model(model) if self.fleet.has_gathered else ()
        is_whole = self.fleet.has_gathered and not self.admission.is_held_back
        if self.admission.is_held_back:
            waiting = tuple(of for of in waiting if self.open_requests.has_begun_group(of))
        rule, hub = self._rule_of(model), self.models[model].seen
        return FleetView(
            waiting,
            self._shown_instances(model),
            self.models[model].steps,
            frozenset(self.open_requests.alone),
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

    def facts_of(self, of: RequestId, now: float) -> RequestFacts:
        """Return what a policy is told of an open request beside the view. One look asks it of hundreds."""
        submission, open_, response = self.state.submissions[of.submission], self.requests[of], self.responses.get(of)
        request = submission.requests[of.index]
        group = submission.groups[request.group]
        made = 0 if response is None else response.count
        return RequestFacts(
            self.lengths.estimate_one((of.submission, request.group), group, made, now),
            group.prompt_tokens + (made or request.kept),
            group.priority,
            open_.step < self.models[open_.model].steps,
            group.first == of.index,
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
        rule, versions, arrivals = self._rule_of(model), self.models[model].published, self.models[model].arrivals
        has_gathered, alone, now = self.fleet.has_gathered, self.open_requests.alone, self._context.now
        of_all = rule, versions, has_gathered, bool(alone)
        is_otherwise = self._shown_for.get(model) != of_all
        self._shown_for[model] = of_all
        changes = self.fleet.changes, arrivals.changes
        if not (is_otherwise or alone) and model in self._shown and self._shown[model][0] == changes:
            return self._shown[model][1]
        newest = max(versions.published, default=-1)
        later = PublishedVersions(versions.seq, (*versions.published, newest + 1), versions.retired)
        stays = VersionRule(staleness=min(0 if rule is None else rule.staleness, STAYS_BEHIND_MAX))
        may: dict[int | None, tuple[bool, bool]] = {}
        instances, is_expected = [], False
        for each in self.fleet.of_model(model):
            version, shown = each.version, each.shown
            arrives_in_s = None if version == arrivals.version else arrivals.arrives_in_s(each.runner, version, now)
            # A request that is tried alone keeps others from an instance, whatever else is the same there.
            if shown is None or is_otherwise or alone or shown.arrives_in_s != arrives_in_s:
                if version not in may:
                    may_start = rule is None or version is None or rule.allows(version, versions)
                    seen = later if version == newest else versions
                    may_stay = version is not None and stays.allows(version, seen)
                    may[version] = may_start, may_stay
                # By position: by name it takes twice as long, for thousands of instances.
                shown = each.shown = InstanceView(
                    each.runner,
                    each.slots,
                    each.pending,
                    each.executing,
                    each.takes_more and not each.awaits_version and not self.open_requests.is_reserved(each),
                    each.is_leaving,
                    version,
                    each.keeps_versions and each.has_reported and has_gathered,
                    each.version_wanted,
                    *may[version],
                    arrives_in_s,
                    each.is_local,
                )
            instances.append(shown)
            is_expected = is_expected or arrives_in_s is not None
        found = tuple(instances)
        if is_expected:
            # Time alone changes when it comes.
            self._shown.pop(model, None)
        else:
            self._shown[model] = changes, found
        return found

    # ------------------------------------------------------------------------------------------ what a policy says

    def _withdraw(self, event: Withdraw) -> None:
        request = self.requests.get(event.request)
        if request is not None and request.placement is not None:
            self.attempts.withdraw(request.placement, event.target, event.reason)

    def _want(self, event: Want) -> None:
        """Tell an instance with each answer to a heartbeat what to have, from now on."""
        instance = self.instances.get(event.runner)
        # Before all runners have reported it is not known who has what.
        if instance is not None and instance.keeps_versions and self.fleet.has_gathered:
            instance.version_wanted = event.version
            arrivals, version = self.models[instance.model].arrivals, event.version
            arrivals.wanted(event.runner, None if version == "newest" else version, self._context.now)
            self.fleet.note_changed(instance)
            self.open_requests.end_unreachable(instance.model)

    def _end_seeding(self, event: EndSeeding) -> None:
        """Tell the trainer's own engine with each answer to a heartbeat that it may stop, from now on."""
        instance = self.instances.get(event.runner)
        if instance is not None and instance.is_local:
            instance.is_enough = True

    # ------------------------------------------------------------------------------------------ the log and the hub

    def _entry_folded(self, event: EntryFolded) -> None:
        match event.outcome:
            case Submitted(opened=opened):
                for of in opened:
                    self.open_requests.open(of)
            case Ended(requests=gone) | Cancelled(requests=gone) | Attached(dropped=gone):
                for of in gone:
                    self.lengths.ended(of)
                    self.open_requests.close(of)
            case Acknowledged(requests=done):
                for of in done:
                    self.open_requests.done(of)
            case _:
                pass

    def _prompt_loaded(self, event: PromptLoaded) -> None:
        request = self.requests.get(event.request)
        if request is None or request.placement is None:
            return
        if event.rule.pinned is None:
            consumer = self.state.submissions[event.request.submission].consumer
            self._rules[request.model] = consumer, self.state.consumers[consumer].attachment, event.rule
        self._assignments.prompt_loaded(request.placement, event)

    def _storing_failed(self, event: StoringFailed) -> None:
        for each in event.requests:
            self.open_requests.store_end(each)

    def _room_seen(self, event: RoomSeen) -> None:
        self.admission.payload_bytes_max = event.payload_bytes_max
        self.open_requests.look_at_room()

    def _versions_seen(self, event: VersionsSeen) -> None:
        model, versions = event.model, self.models[event.model]
        retired = versions.published.retired
        if versions.take(event, self.fleet.remote_of(model), self._context.now):
            self.open_requests.restart_too_old(model)
        if event.versions.retired != retired:
            self.open_requests.restart_retired(model)
        self.open_requests.end_unreachable(model)

    def _bus_changed(self, event: BusChanged) -> None:
        self.fleet.note_connection(is_connected=event.is_connected)

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
                self._context.effects.append(AnswerHeartbeat(HeartbeatResult(self.log, self.term, _NO_VERSIONS)))
            return
        now, versions, version = self._context.now, self.models[beat.model], instance.version
        if instance.take(beat, now):
            self.fleet.note_changed(instance)
        versions.arrivals.heard(event.runner, version, beat.version, beat.loads_in_s, now)
        if beat.version != version:
            self.open_requests.end_unreachable(beat.model)
        if beat.measured and now - instance.fitted_at >= self.limits.fitted_s:
            # Here, and not in a look of the policies: those would fit all instances at once.
            instance.fitted_at, instance.step_model = now, fitted(instance.measured)
        flush_s = len(self.instances) / self.limits.frames_per_s_max
        wants_report, wanted = not instance.has_reported, instance.version_wanted
        result = HeartbeatResult(
            self.log, self.term, versions.published, wants_report, flush_s, wanted, is_enough=instance.is_enough
        )
        self._context.effects.append(AnswerHeartbeat(result))

    def _report(self, event: ReportCame) -> None:
        report = event.report
        instance = self._heard(event.runner, report.log, report.incarnation)
        if instance is None:
            return
        forget, resend = self._reports.take(instance, report)
        instance.has_reported = True
        self.fleet.note_changed(instance)
        self._context.effects.append(AnswerReport(ReportResult(self.log, self.term, tuple(forget), tuple(resend))))

    def _frame(self, event: FrameCame) -> None:
        frame = event.frame
        instance = self._heard(event.runner, frame.log, frame.incarnation)
        if instance is None:
            return
        if not is_well_formed(frame):
            self._lose(instance, f"its frame {frame.number} can't be read")
            return
        if frame.tokens and not instance.is_local:
            self.models[instance.model].meter.last_token_at = self._context.now
        resend, is_unknown = self._progress.take_frame(instance, frame)
        wants_report = is_unknown or not instance.has_reported
        result = FrameResult(self.log, self.term, frame.number, tuple(resend), wants_report)
        self._context.effects.append(AnswerFrame(result))

    def _lose(self, instance: Instance, reason: str) -> None:
        """Take an instance for lost: its requests go on elsewhere from what is held."""
        if not self.fleet.remove(instance.runner):
            return
        # What has said that it leaves, and has nothing, may go.
        is_left = instance.is_leaving and not instance.attempts
        if not is_left:
            self.counts.instances_lost += 1
            self.counts.tokens_of_lost += instance.tokens
        self._context.effects.append(InstanceLost(instance.runner, reason, is_left=is_left))
        self.models[instance.model].arrivals.lost(instance.runner)
        placements = [self.placements[attempt] for attempt in sorted(instance.attempts)]
        blamed = self.open_requests.blamed(placements)
        for placement in placements:
            if placement.state is not AttemptState.COMPLETE:
                placement.move(AttemptTransition.LOST)
                why = f"{instance.runner} was lost: {reason}"
                self.open_requests.attempt_over(placement, why, is_blamed=placement in blamed)
        # It may have been the last with its version.
        self.open_requests.end_unreachable(instance.model)

    # ------------------------------------------------------------------------------------------ time

    def _on_time(self) -> None:
        if self.fleet.gather():
            for model in self.fleet.models():
                self.open_requests.end_unreachable(model)
        for instance, reason in self.fleet.silent():
            self._lose(instance, reason)
        self.attempts.ask_again()
        for model, versions in self.models.items():
            versions.meter.see_fleet(self.fleet.remote_of(model))
        if self.fleet.count_rates(self.limits.rate_s):
            self.open_requests.look_at_room()
        self._write_checkpoints()

    def _write_checkpoints(self) -> None:
        """Have the tokens of some instances' attempts written that came since their last checkpoint."""
        limits = self.limits
        # A few at a look, so that frames don't wait for the tokens of the whole fleet.
        looks = limits.checkpoint_s / limits.look_s
        for instance in self.fleet.due_to_checkpoint(limits.checkpoint_s)[: 1 + int(2 * len(self.instances) / looks)]:
            instance.checkpointed_at = self._context.now
            for attempt in sorted(instance.attempts):
                placement = self.placements[attempt]
                of = placement.request
                part = checkpoint(placement, self.responses.get(of), self.state.request(of))
                if part is not None:
                    self._context.effects.append(part)
