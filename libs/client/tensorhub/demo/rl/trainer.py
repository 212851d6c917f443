"""A trainer: GRPO over responses that runners generate, whichever of them are killed meanwhile.

python -m tensorhub.demo.rl.clock MODEL
tensorhub up --runners 2 --model MODEL &
python -m tensorhub.demo.rl.trainer CHECKPOINT     (CHECKPOINT: a file, made if it is not there)

Killed and started again, it goes on. What is lost at most is the step under way; no response is, and none counts twice:
- Prompts have ids, so to submit them again is nothing. The checkpoint names those that no step has learned from.
- The checkpoint is written before its version is published, so it is never older than a version that others have seen.
- `done` comes last. What was learned from but not done comes again, and is not among the prompts of the checkpoint.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub.demo.rl.clock import HOURS, MODEL, build, hour_of
from tensorhub.demo.rl.grpo import grpo_loss
from tensorhub.demo.rl.step_facts import facts_of, lines_of_lengths
from tensorhub.demo.verify import report

GROUPS, GROUP_SIZE = 8, 16
"""A step learns from so many prompts, with so many responses each."""
LEARNING_RATE, WARM_UP_STEPS = 4e-3, 5


@dataclass
class Progress:
    """What a trainer that comes back has to know beside weights and optimizer."""

    epoch: int
    """Of its history: a trainer that begins anew has a higher one, and what those before it left is dropped."""
    step: int = 0
    prompts: int = 0
    """How many were submitted, or are about to be."""
    waiting: list[str] = field(default_factory=list)
    """The ids of those that no step has learned from."""
    last: dict[str, Any] | None = None
    """What was reported of the last step."""


class Trainer:
    """Model, optimizer and progress, as the checkpoint has them."""

    def __init__(self, checkpoint: Path, seed: int, steps: int, device: str, *, went_back: bool) -> None:
        self.checkpoint, self.seed, self.steps = checkpoint, seed, steps
        self.until: int | None = None
        """The hour that a response ends with; None: all are as long."""
        self.lengths: Path | None = None
        """Where the lengths of responses are written, as a line of JSON for each group."""
        self.model = build(seed).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
        self.progress = Progress(epoch=int(time.time()))
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location=device)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            epoch = self.progress.epoch if went_back else saved["progress"]["epoch"]
            self.progress = Progress(**saved["progress"] | {"epoch": epoch})

    def save(self) -> None:
        """Write the checkpoint whole, or not at all."""
        beside = self.checkpoint.with_suffix(".new")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"progress": asdict(self.progress)}, beside)
        beside.replace(self.checkpoint)

    def train(self, hub: tensorhub.Hub) -> None:
        """Learn until there are no prompts left."""
        # The checkpoint counts, and not what a trainer before this one has left in the hub's memory.
        policy = hub.register(MODEL, self.model, replica="trainer", resume="values")
        if policy.version is None:
            self.save()
            policy.publish()
        rollouts = hub.rollouts(
            MODEL,
            epoch=self.progress.epoch,
            group_size=GROUP_SIZE,
            # The responses of the next step are generated during this one: they begin at most one version behind, and
            # go on with a version that comes meanwhile. Each token has the log-probability that it was drawn with.
            staleness=1,
            on_update="continue",
            sampling=Sampling(
                max_tokens=HOURS,
                temperature=1.0,
                seed=self.seed,
                stop_token_ids=() if self.until is None else (self.until,),
            ),
        )
        if self.progress.last is not None:
            report("step", **self.progress.last)
        self.next_prompts()
        rollouts.submit(self.prompts(self.progress.waiting))
        report("begins", step=self.progress.step, epoch=self.progress.epoch)
        for batch in rollouts.batches(min_responses=GROUPS * GROUP_SIZE, wait_s=600):
            fresh = [each for each in batch.responses if each.group in self.progress.waiting]
            if fresh:
                self.step(policy, fresh)
            if len(fresh) < len(batch.responses):
                report("again", responses=len(batch.responses) - len(fresh))
            batch.done()
            if new := self.next_prompts():
                rollouts.submit(self.prompts(new))
        rollouts.close()

    def step(self, policy: tensorhub.Shard, responses: list[tensorhub.Response]) -> None:
        """Learn from whole groups, and publish what became of the model."""
        progress, facts = self.progress, facts_of(responses, policy.version or 0, self.until)
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate(progress.step, self.steps)
        loss = grpo_loss(self.model, responses, self.until)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        # Waits until no runner reads the version before, and publishes at the end of the block.
        with policy.overwriting(publish=True):
            self.optimizer.step()
            progress.step += 1
            progress.waiting = [each for each in progress.waiting if each not in facts["groups"]]
            progress.last = {"step": progress.step, "loss": loss.item(), **facts}
            self.save()
        if self.lengths is not None:
            with self.lengths.open("a") as file:
                file.writelines(lines_of_lengths(responses, progress.step, HOURS))
        report("step", **progress.last)

    def next_prompts(self) -> list[str]:
        """Take so many new prompts that two steps' worth is under way; return their ids."""
        first, room = self.progress.prompts, 2 * GROUPS - len(self.progress.waiting)
        self.progress.prompts = min(first + room, self.steps * GROUPS)
        new = [str(number) for number in range(first, self.progress.prompts)]
        self.progress.waiting += new
        return new

    def prompts(self, ids: list[str]) -> list[Prompt]:
        """Return prompts by their ids."""
        return [Prompt([hour_of(int(each), self.seed)], id=each) for each in ids]


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: it rises at first, and falls to a tenth at the end."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.1, 1 - step / steps)


def main() -> None:
    """Learn for some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="what it computes on, as cuda")
    parser.add_argument(
        "--until", type=int, metavar="HOUR", help="a response ends with this hour, or after a whole day"
    )
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", help="add the lengths of responses to it, as JSON lines"
    )
    parser.add_argument("--went-back", action="store_true", help="this checkpoint is older than the last one")
    options = parser.parse_args()
    trainer = Trainer(options.checkpoint, options.seed, options.steps, options.device, went_back=options.went_back)
    trainer.until = options.until
    trainer.lengths = options.lengths
    with tensorhub.connect() as hub:
        trainer.train(hub)


if __name__ == "__main__":
    try:
        main()
    except tensorhub.TensorHubError as error:
        sys.exit(f"trainer: {error}")
