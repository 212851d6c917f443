"""One job on a real hub: runners with the torch engine, a trainer that takes responses step by step, and kills.

The trainer's own work takes `token_s` for each token and no processor, so that the runners have all of it. It works as
the simulator's does (`rollout_performance.job.trainer`): a step's prompts are submitted together, it trains what has
come, at least a micro-batch at a time, and publishes once it has trained all. Runners are killed where the trainer has
got so many responses, which is the same place with each policy.

Invariant: each response came once, and is as long as it was drawn; else `run` raises.
"""

import asyncio
import contextlib
import math
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tensorhub
from benchmarks.demo_rl import counted_engine
from benchmarks.demo_rl.training_run import QUIET_MODEL, ROOT
from benchmarks.rollouts import drawn_engine
from benchmarks.rollouts.drawn_engine import Drawn
from tensorhub.local.hub import LocalHub, LocalRollouts
from tensorhub_common.errors import RolloutUnavailable, TensorHubError
from tensorhub_common.protocol.rollout.entries import ArrivalTerm, PolicyName
from tensorhub_common.protocol.rollout.messages import EngineStep
from tensorhub_common.protocol.rollout.payloads import request_seed
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_runner.engines.schedule import EngineLimits
from tensorhub_runner.engines.torch_engine import TorchEngine
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.scenario import Lengths, Price, Scenario, Spot, Trainer
from tensorhub_simulator.rollout_performance.models import draws

JOB: Final = "default"
MODEL: Final = "policy"
ENGINE: Final = "benchmarks.rollouts.drawn_engine:load"
VOCABULARY: Final = 64
CONFIG: Final = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=None,
    dtype="float32",
)
SAMPLING_SEED: Final = 7
UNPACED_S: Final = 0.005
"""What the model's steps take about where they aren't stretched."""
LOOK_S: Final = 0.1
STATUS_S: Final = 1.0
READY_S_MAX: Final = 120.0
RUN_S_MAX: Final = 900.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is generated, on what, and what is killed; times in seconds."""

    runners: int = 4
    slots: int = 8
    steps: int = 6
    groups: int = 16
    """Prompts of a step."""
    group_size: int = 4
    prompts: int = 48
    """After so many the same prompts come again: what was made of them before tells of lengths."""
    micro_batch: int = 16
    prompt_tokens: int = 8
    median: float = 60.0
    """Of lengths, in tokens; log-normal with these deviations between prompts and within them."""
    between: float = 0.6
    within: float = 0.5
    longest: int = 512
    step: StepModel = StepModel(0.02, 0.001, 0.0)
    """How long an engine's step takes at least."""
    prefill_s: float = 0.0005
    """For each token of a context."""
    token_s: float = 0.0006
    """Training takes so long for each token."""
    kills: int = 3
    """Runners that are killed, evenly over the job."""
    back_s: float = 25.0
    """Each is back after so long, or as soon as it can: torch alone takes 8 s of a processor."""
    seeds: bool = False
    """Whether the trainer's own engine generates at the beginning of a step; else it is `ahead`."""
    seed_first_s: float = 3.0
    ahead: int = 1
    """How many steps' prompts are submitted beside those of the step that is trained, where it does not seed."""
    streams: bool = False
    """Whether prompts come without steps: it trains whatever has ended, as many responses as a step has for each
    version, and submits as many groups as it has used."""
    seed: int = 0

    @property
    def steps_ahead(self) -> int:
        """How many it is ahead."""
        return 0 if self.seeds else self.ahead

    @property
    def groups_submitted(self) -> int:
        """Groups of the whole job; without steps some are not done at its end."""
        return self.groups * (self.steps + self.steps_ahead * self.streams)

    def step_of(self, group: int) -> tuple[int, int]:
        """Return a group's step and its number in that; without steps all are of the first one."""
        return (0, group) if self.streams else divmod(group, self.groups)

    @property
    def step_responses(self) -> int:
        """Responses of a step."""
        return self.groups * self.group_size

    def scenario(self) -> Scenario:
        """Return it as the simulator has it; lengths are drawn by that."""
        return Scenario(
            name="real",
            seed=self.seed,
            engine=EngineCosts(
                self.step.fixed_s or UNPACED_S,
                self.step.each_s,
                self.step.attention_s,
                1 / self.prefill_s,
                self.slots,
            ),
            lengths=Lengths(
                self.prompt_tokens, self.median, self.between, self.within, self.longest, prompts=self.prompts
            ),
            trainer=Trainer(
                self.steps,
                self.groups,
                self.group_size,
                self.micro_batch,
                self.token_s,
                publish_s=0.0,
                engines=1,
                seeds=self.seeds,
                streams=self.streams,
                steps_ahead=self.steps_ahead,
                seed_first_s=self.seed_first_s,
            ),
            spot=Spot(boot_s=self.back_s, load_s=0.0, changes=((0.0, self.runners),)),
            price=Price(1.0, 1.0),
            pause_s=0.0,
        )

    def prompt(self, group: int) -> list[int]:
        """Return the tokens of a prompt; groups count over all steps."""
        name = draws.prompt_of(self.scenario(), *self.step_of(group))
        chance = Random(f"prompt {self.seed} {name}")
        return [chance.randrange(VOCABULARY) for _ in range(self.prompt_tokens)]

    def lengths(self) -> dict[int, int]:
        """Return the lengths of all responses, by the seeds of their requests."""
        scenario = self.scenario()
        found = {}
        for group in range(self.groups_submitted):
            step, number = self.step_of(group)
            for index in range(self.group_size):
                length = draws.length_of(scenario, step, number * self.group_size + index)
                found[request_seed(SAMPLING_SEED, str(group), index)] = length
        return found

    def killed(self) -> list[tuple[int, str]]:
        """Return after how many responses which runner is killed."""
        chance = Random(f"kills {self.seed}")
        whole = self.steps * self.step_responses
        return [
            (whole * (number + 1) // (self.kills + 1), f"runner-{chance.randrange(self.runners)}")
            for number in range(self.kills)
        ]


class Took(msgspec.Struct, kw_only=True):
    """What came of a job; times in seconds, from the first prompt on."""

    policy: PolicyName
    seed: int
    terms_off: frozenset[ArrivalTerm] = frozenset()
    """Of the policy `arrival`."""
    seconds: float
    tokens: int
    """That the trainer got."""
    made: int
    """By all engines."""
    steps: list[float]
    """How long each took."""
    waited_s: float
    seeded_s: float
    ages: dict[int, int]
    """By how many versions a token was old when it was delivered: how many tokens."""
    moved: int
    """Responses that more than one attempt made."""
    computed_by_moves: int
    """Tokens whose cache was computed again since their response moved."""
    computed_by_updates: int
    """And since weights changed."""
    kills: list[float]
    """When runners were killed."""
    back_s: list[float]
    """How long it took each of them to be there again, with weights."""
    load_s: list[float]
    """How long it took each runner from a publication to the version."""
    publish_s: list[float]
    engine: StepModel | None = None
    """What steps took as measured."""

    @property
    def name(self) -> str:
        """The policy, and what of it is switched off."""
        return " without ".join([self.policy, *sorted(self.terms_off)])

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the trainer got, a second."""
        return self.tokens / self.seconds

    @property
    def away_s(self) -> float:
        """How long instances were away, all together."""
        back = [*self.back_s, *([math.inf] * len(self.kills))]
        return sum(min(back_s, self.seconds - at) for at, back_s in zip(self.kills, back, strict=False))

    @property
    def again_share(self) -> float:
        """Tokens that were made and did not come, for each that came."""
        return self.made / self.tokens - 1

    @property
    def waits_share(self) -> float:
        """The share of the time in which the trainer had nothing to do."""
        return self.waited_s / self.seconds

    @property
    def age(self) -> float:
        """By how many versions tokens were old, on average."""
        return sum(age * count for age, count in self.ages.items()) / max(1, sum(self.ages.values()))


class TrainedJob:
    """One job with one policy; `run` it once."""

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        policy: PolicyName,
        terms_off: frozenset[ArrivalTerm] = frozenset(),
    ) -> None:
        self._folder, self._workload = folder, workload
        self._hub_directory = folder / "hub"
        self._kills = workload.killed()
        self._ages = Counter[int]()
        self._lengths = workload.lengths()
        self._came: set[int] = set()
        self._submitted = 0
        """Steps; without steps, groups."""
        self._published: dict[int, float] = {}
        self._away: dict[str, float] = {}
        """Runners that were killed, and when."""
        self._versions: dict[str, int | None] = {}
        self._began = 0.0
        self._took = Took(
            policy=policy,
            seed=workload.seed,
            terms_off=terms_off,
            seconds=0.0,
            tokens=0,
            made=0,
            steps=[],
            waited_s=0.0,
            seeded_s=0.0,
            ages={},
            moved=0,
            computed_by_moves=0,
            computed_by_updates=0,
            kills=[],
            back_s=[],
            load_s=[],
            publish_s=[],
        )

    async def run(self) -> Took:
        """Train to the end. Raises `TensorHubError` where a response is lost or has another length, or it hangs."""
        workload = self._workload
        CONFIG.save_pretrained(self._folder / "model")
        self._hub_directory.mkdir()
        drawn = Drawn(self._lengths, workload.step, workload.prefill_s, workload.back_s)
        (self._hub_directory / drawn_engine.FILE).write_bytes(msgspec.json.encode(drawn))
        own = {name: text for name, text in os.environ.items() if not name.startswith("TENSORHUB_")}
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {
            **own,
            **QUIET_MODEL,
            "PYTHONPATH": paths,
            "TENSORHUB_RUNNER_SLOTS": str(workload.slots),
            "TENSORHUB_ROLLOUT_TERMS_OFF": ",".join(sorted(self._took.terms_off)),
        }
        rollouts = LocalRollouts(workload.runners, ENGINE, self._folder / "model", JOB)
        hub = LocalHub(self._hub_directory, rollouts=rollouts, environment=environment)
        async with hub, asyncio.timeout(RUN_S_MAX):
            os.environ["TENSORHUB_DIR"] = str(self._hub_directory)
            async with await tensorhub.connect_async(JOB) as trainer:
                await self._trained(hub, trainer)
            self._took.made = counted_engine.tokens_made(self._hub_directory)
        self._took.ages = dict(sorted(self._ages.items()))
        self._took.engine = step_model(drawn_engine.steps_of(self._hub_directory))
        expected = workload.steps * workload.step_responses
        if len(self._came) < expected or (len(self._came) > expected and not workload.streams):
            raise TensorHubError(f"{len(self._came)} of {expected} responses came")
        return self._took

    async def _trained(self, hub: LocalHub, trainer: tensorhub.AsyncHub) -> None:
        workload = self._workload
        torch.manual_seed(workload.seed)
        module = LlamaForCausalLM(CONFIG)
        shard = await trainer.register(MODEL, module, replica="trainer")
        await shard.publish(1)
        engine = None
        if workload.seeds:
            torch_engine = TorchEngine(module, is_exact=True, limits=EngineLimits(slots=workload.slots))
            engine = drawn_engine.DrawnEngine(torch_engine, self._hub_directory, "trainer")
        sampling = tensorhub.Sampling(max_tokens=workload.longest + 1, seed=SAMPLING_SEED)
        rollouts = await trainer.rollouts(
            MODEL,
            group_size=workload.group_size,
            staleness=workload.steps_ahead,
            policy=self._took.policy,
            sampling=sampling,
        )
        await self._until_all_serve(rollouts)
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            look = group.create_task(self._look_always(rollouts))
            for step in range(workload.steps):
                began = time.monotonic()
                await self._make_step(hub, rollouts, engine, step)
                publishes = time.monotonic()
                async with shard.overwriting(publish=True):
                    for each in module.parameters():
                        each.data.mul_(1.001)
                self._published[shard.version or 0] = time.monotonic()
                self._took.publish_s.append(time.monotonic() - publishes)
                self._took.steps.append(time.monotonic() - began)
            self._took.seconds = time.monotonic() - self._began
            look.cancel()
        await rollouts.close()

    async def _make_step(
        self, hub: LocalHub, rollouts: tensorhub.AsyncRollouts, engine: object | None, step: int
    ) -> None:
        workload, took = self._workload, self._took
        if workload.streams:
            await self._submit_used(rollouts)
        while not workload.streams and self._submitted <= min(step + workload.steps_ahead, workload.steps - 1):
            await self._submit(rollouts, _groups(workload, self._submitted), priority=-self._submitted)
            self._submitted += 1
        if engine is not None:
            began = time.monotonic()
            async with rollouts.seeding(engine, initial_s=workload.seed_first_s):
                pass
            took.seeded_s += time.monotonic() - began
        wanted = None if workload.streams else [str(each) for each in _groups(workload, step)]
        # Without steps a batch may have more than is asked for: these count for the next version.
        while (left := (step + 1) * workload.step_responses - len(self._came)) > 0:
            began = time.monotonic()
            count = min(workload.micro_batch, left)
            async with contextlib.aclosing(rollouts.batches(count, whole_groups=False, groups=wanted)) as batches:
                batch = await anext(batches)
                took.waited_s += time.monotonic() - began
                self._take(batch)
                self._kill_due(hub)
                await asyncio.sleep(workload.token_s * sum(len(each.token_ids) for each in batch.responses))
                await batch.done()
            if workload.streams:
                await self._submit_used(rollouts)

    async def _submit(self, rollouts: tensorhub.AsyncRollouts, groups: Iterable[int], priority: int = 0) -> None:
        prompts = [tensorhub.Prompt(self._workload.prompt(each), id=str(each)) for each in groups]
        await rollouts.submit(prompts, priority=priority)

    async def _submit_used(self, rollouts: tensorhub.AsyncRollouts) -> None:
        """Submit as many groups as are used, so that as many are open as at the beginning."""
        workload = self._workload
        used = len(self._came) // workload.group_size
        upto = min(workload.groups_submitted, used + workload.groups * (1 + workload.steps_ahead))
        if upto > self._submitted:
            await self._submit(rollouts, range(self._submitted, upto))
            self._submitted = upto

    def _take(self, batch: tensorhub.AsyncBatch) -> None:
        took = self._took
        for response in batch.responses:
            expected = self._lengths[response.seed]
            if response.finish_reason != "stop" or len(response.token_ids) != expected or response.seed in self._came:
                raise TensorHubError(
                    f"response {response.index} of group {response.group} came with {len(response.token_ids)} tokens "
                    f"and {response.finish_reason!r} ({response.error}), where {expected} tokens were drawn for it"
                )
            self._came.add(response.seed)
            took.tokens += expected
            took.moved += len({run.attempt for run in response.runs}) > 1
            for before, run in zip(response.runs, response.runs[1:], strict=False):
                again = len(response.prompt_ids) + run.start
                if before.attempt == run.attempt:
                    took.computed_by_updates += again
                else:
                    took.computed_by_moves += again
        self._ages.update(batch.staleness.tokens)

    # ------------------------------------------------------------------------------------------ instances

    def _kill_due(self, hub: LocalHub) -> None:
        while self._kills and len(self._came) >= self._kills[0][0]:
            _, runner = self._kills.pop(0)
            drawn_engine.killing(self._hub_directory, runner)
            with contextlib.suppress(ProcessLookupError):
                os.kill(hub.hub.pids[runner], signal.SIGKILL)
                self._away[runner] = time.monotonic()
                self._took.kills.append(time.monotonic() - self._began)

    async def _until_all_serve(self, rollouts: tensorhub.AsyncRollouts) -> None:
        async with asyncio.timeout(READY_S_MAX):
            while True:
                instances = (await rollouts.status(timeout_s=READY_S_MAX)).instances
                if sum(each.version is not None for each in instances) == self._workload.runners:
                    return
                await asyncio.sleep(LOOK_S)

    async def _look_always(self, rollouts: tensorhub.AsyncRollouts) -> None:
        """See when runners have versions, and when those are back that were killed."""
        gone = set[str]()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                instances = {each.runner: each for each in (await rollouts.status(timeout_s=STATUS_S)).instances}
            except RolloutUnavailable:
                continue
            now = time.monotonic()
            gone |= {each for each in self._away if each not in instances}
            for name, each in instances.items():
                if name in gone and each.version is not None:
                    gone.discard(name)
                    self._took.back_s.append(now - self._away.pop(name))
                elif each.version in self._published and self._versions.get(name, each.version) != each.version:
                    self._took.load_s.append(now - self._published[each.version])
                self._versions[name] = each.version


def _groups(workload: Workload, step: int) -> range:
    return range(step * workload.groups, (step + 1) * workload.groups)


def step_model(steps: Iterable[EngineStep]) -> StepModel | None:
    """Return what steps take, by least squares without a negative part; None: too few were made."""
    found = [*steps]
    if len(found) < 64 or len({each.batch for each in found}) < 2:  # noqa: PLR2004 (a slope needs two)
        return None
    seconds = torch.tensor([each.seconds for each in found], dtype=torch.float64)
    terms = torch.tensor([[1.0, each.batch, each.batch * each.context_tokens] for each in found], dtype=torch.float64)
    scale = terms.norm(dim=0)
    kept = [0, 1, 2]
    while True:
        solved = torch.linalg.lstsq((terms / scale)[:, kept], seconds[:, None]).solution[:, 0] / scale[kept]
        if solved.min() >= 0 or len(kept) == 1:
            values = dict(zip(kept, solved.tolist(), strict=True))
            return StepModel(*(values.get(which, 0.0) for which in range(3)))
        del kept[int(solved.argmin())]


def middle(values: Iterable[float]) -> float:
    """Return the median; NaN where there is nothing."""
    found = [*values]
    return statistics.median(found) if found else math.nan
