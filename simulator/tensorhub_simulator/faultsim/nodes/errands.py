"""What an agent of the simulation takes time over: hashing, looking, copying, comparing layouts, asking the planner.

Always true: what comes of it is told to the core later, so anything may happen in between, and never to another life of
the agent than the one that began it.
"""

import random
from typing import TYPE_CHECKING, Final

from tensorhub_agent.compute.amax_table import AmaxTable
from tensorhub_agent.core.effects import (
    AskPlan,
    CheckSiblings,
    CopyMade,
    Digest,
    Digested,
    Duplicated,
    Keep,
    Kept,
    Key,
    MakeCopy,
    PlanCame,
    Probe,
    Probed,
    Save,
    SiblingsChecked,
)
from tensorhub_agent.core.shard_state import Place
from tensorhub_agent.primitives.program_units import Completion
from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_common.layout.layout import shared_mismatch
from tensorhub_common.programs.amax_reductions import folds_of
from tensorhub_common.protocol.names import cached_version
from tensorhub_common.protocol.plans import Plan, PlanAnswer, Refusal
from tensorhub_simulator.faultsim.models.segments import Segment, Shelved
from tensorhub_simulator.faultsim.transfers.source_session import AGAIN_ODDS

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.agent import AgentNode

PLAN_ASK_S: Final = 0.9

SLOW_DISK_ODDS: Final = 0.1
SLOW_DISK_S: Final = 3.0
FULL_DISK_ODDS: Final = 0.02
ASIDE_ODDS: Final = 0.1


class Errands:
    """One agent's."""

    def __init__(self, agent: "AgentNode") -> None:
        """Begin with none."""
        self._agent, self._world, self._clock = agent, agent.world, agent.clock
        self._disk = random.Random(f"{agent.world.seed}/{agent.world.job}/{agent.name}")
        """Drawn apart, so that a disk changes nothing else of a seed but what waits for it."""

    def digest(self, effect: Digest) -> None:
        """Hash one half now and the other half later, so that a write in between shows."""
        shelved = self._agent.shelf[effect.key]
        segment = shelved.target if effect.filled else shelved.segment
        half = len(segment.nbytes) // 2
        first = segment.digests(range(half)) if self._world.plan.digests else b""

        def rest() -> None:
            second = segment.digests(range(half, len(segment.nbytes))) if self._world.plan.digests else b""
            self._agent.news(Digested(effect.key, effect.number, first + second))

        self._clock.after(self._clock.lag(), self._agent, rest)

    def takes_back(self, key: Key) -> bool:
        """Tell whether a new process can take back what stands here: for a copy it may lack memory or descriptors."""
        return cached_version(key.replica) is None or self._disk.random() >= ASIDE_ODDS

    def keep(self, effect: Keep) -> None:
        """Write the manifest, which a disk may take its time for."""
        self._agent.shelf[effect.key].unwritten = effect
        late_s = self._disk.random() * SLOW_DISK_S if self._disk.random() < SLOW_DISK_ODDS else 0.0
        self._clock.after(late_s, self._agent, lambda: self._keep(effect))

    def _keep(self, effect: Keep) -> None:
        shelved = self._agent.shelf.get(effect.key)
        if shelved is not None and shelved.unwritten is effect and self._disk.random() < FULL_DISK_ODDS:
            shelved.refused = effect.version
            self._agent.news(Kept(effect.key, effect.number, "no room for the manifest"))
            return
        if shelved is not None and shelved.unwritten is effect:
            version, root, digests = effect.version, effect.root, effect.digests
            shelved.save(
                Save(key=effect.key, state="ready", partial=False, version=version, root=root, digests=digests)
            )
        self._agent.news(Kept(effect.key, effect.number))

    def probe(self, effect: Probe) -> None:
        """Look who maps the memory, almost at once."""
        self._clock.after(self._clock.lag() * 0.1, self._agent, lambda: self._probe(effect))

    def _probe(self, effect: Probe) -> None:
        shelved = self._agent.shelf.get(effect.key)
        if shelved is not None:
            segment = shelved.spare if effect.spare and shelved.spare is not None else shelved.segment
            self._agent.news(Probed(effect.key, effect.spare, bool(segment.maps)))

    def duplicate(self, key: Key) -> None:
        """Copy one piece after the other into the spare memory, so that whoever writes meanwhile is seen."""
        self._clock.after(self._clock.lag(), self._agent, lambda: self._duplicate(key, 0))

    def _duplicate(self, key: Key, piece: int) -> None:
        shelved = self._agent.shelf.get(key)
        if shelved is None or shelved.spare is None:
            return
        if piece == len(shelved.segment.nbytes):
            self._agent.news(Duplicated(key))
            return
        shelved.spare.write(shelved.spare.at[piece], shelved.segment.piece(piece))
        self._clock.after(self._clock.lag(), self._agent, lambda: self._duplicate(key, piece + 1))

    def make_copy(self, effect: MakeCopy) -> None:
        """Make memory for a copy."""
        self._clock.after(self._clock.lag(), self._agent, lambda: self._make_copy(effect))

    def _make_copy(self, effect: MakeCopy) -> None:
        key, table = effect.key, self._world.layouts.table(effect.layout)
        if key not in self._agent.shelf:
            place = Place(key, effect.shards, spot=False, layout=effect.layout, nbytes=table.nbytes)
            self._agent.shelf[key] = Shelved(place, Segment(table))
        made = CopyMade(key, effect.shards, effect.layout, nbytes=tuple(table.nbytes))
        self._agent.carry_out(self._agent.core.copy_made(made, self._agent.now))

    def check_siblings(self, effect: CheckSiblings) -> None:
        """Compare a layout with those of the siblings."""
        self._clock.after(self._clock.lag(), self._agent, lambda: self._check_siblings(effect))

    def _check_siblings(self, effect: CheckSiblings) -> None:
        mine = self._agent.shelf.get(effect.key)
        if mine is not None:
            layout = self._world.layouts.layout
            clashes = (shared_mismatch(layout(mine.place.layout), layout(each.layout)) for each in effect.siblings)
            mismatch = next((why for why in clashes if why is not None), None)
            self._agent.news(SiblingsChecked(effect.key, effect.number, mismatch))

    def plan(self, effect: AskPlan) -> None:
        """Ask the planner. The answer may come twice, late or never; then the bound is the answer."""
        answered: list[bool] = []

        def come(answer: PlanAnswer) -> None:
            if not answered:
                answered.append(True)
                came = self._came(effect, answer)
                if self._clock.chance(AGAIN_ODDS):
                    self._clock.after(self._clock.lag(), self._agent, lambda: self._agent.news(came))
                self._agent.news(came)

        silence = Refusal(error=NO_ANSWER, reason="no planner answered")
        self._clock.after(PLAN_ASK_S, self._agent, lambda: come(silence))
        world, life = self._world, self._agent.life
        if not world.net_loses(self._agent):

            def reply(answer: PlanAnswer) -> None:
                if not world.net_loses(self._agent):
                    self._clock.after(self._clock.lag(), self._agent, lambda: come(answer), life)

            self._clock.after(self._clock.lag(), world.planner, lambda: world.planner.asked(effect.demand, reply))

    def _came(self, effect: AskPlan, answer: PlanAnswer) -> PlanCame:
        """Get the program that a plan names, which now and then can't be had."""
        if not isinstance(answer, Plan) or answer.program is None:
            return PlanCame(effect.key, effect.number, answer)
        if self._world.net_loses(self._agent):
            lost = Refusal(error=NO_ANSWER, reason="the transfer program can't be had")
            return PlanCame(effect.key, effect.number, lost)
        layouts, shelved = self._world.layouts, self._agent.shelf.get(effect.key)
        program = layouts.executions[answer.program]
        completion = Completion(program, shelved.target.table) if shelved is not None else None
        folds, table = (folds_of(program), AmaxTable(program)) if program.partials else (None, None)
        return PlanCame(effect.key, effect.number, answer, program, completion, folds, table)
