"""docs/guides/rollouts.md: its trainer learns, and its engine generates, on hubs that are begun as the page says."""

import re
from pathlib import Path
from textwrap import indent
from typing import Final

import pytest
from tests.kit.hubs import running_hub

from tensorhub.local.hub import LocalRollouts

PAGE: Final = (Path(__file__).parents[3] / "docs" / "guides" / "rollouts.md").read_text()
(CONFIG,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
TRAINER, SEEDING, ENGINE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STEP: Final = re.compile(r"step (\d+): 64 responses, reward ([\d.]+), version (\d+)")

LOCAL: Final = "sorted({run.instance for each in batch.responses for run in each.runs})"

COUNT: Final = """
import torch
import tensorhub

with tensorhub.connect() as hub:
    hub.register("policy", {"w": torch.tensor(40.0)}, replica="trainer").publish()
    rollouts = hub.rollouts("policy", sampling=tensorhub.Sampling(max_tokens=3))
    rollouts.submit([tensorhub.Prompt([1])])
    for batch in rollouts.batches(wait_s=300):
        print(batch.responses[0].token_ids.tolist(), batch.responses[0].error)
        batch.done()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_trainer_of_the_guide_learns(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(CONFIG)
    async with running_hub(tmp_path / "hub", 1, rollouts=LocalRollouts(2, model=model)) as hub:
        code, out, err = await hub.run(f"import os\nos.chdir({str(tmp_path)!r})\n{TRAINER}")
    assert (code, err) == (0, "")
    steps = [(int(step), float(reward), int(version)) for step, reward, version in STEP.findall(out)]
    assert [(step, version) for step, _, version in steps] == [(step, step + 2) for step in range(5)]
    assert steps[-1][1] > steps[0][1] + 0.5
    said = [STEP.search(line) for line in PAGE.splitlines() if line.startswith("step ")]
    assert [each is not None for each in said] == [True] * 5


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_trainer_of_the_guide_learns_with_an_engine_of_its_own(tmp_path: Path) -> None:
    """What the page adds for it is put into its trainer."""
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(CONFIG)
    imported, made = re.findall(r"^(?:from|engine) .*$", SEEDING, re.MULTILINE)
    (seeds,) = re.findall(r"^    with .*\n        pass\n", SEEDING, re.MULTILINE)
    (submits,) = re.findall(r"^    rollouts.submit.*\n", SEEDING, re.MULTILINE)
    trainer = TRAINER.replace("    policy.publish()\n", f"    policy.publish()\n    {made}\n", 1)
    trainer = trainer.replace(f"    {submits}", f"    {submits}{indent(seeds, '    ')}", 1)
    trainer = trainer.replace("batch.done()\n", f"batch.done()\n            print({LOCAL})\n", 1)
    async with running_hub(tmp_path / "hub", 1, rollouts=LocalRollouts(2, model=model)) as hub:
        code, out, err = await hub.run(f"import os\nos.chdir({str(tmp_path)!r})\n{imported}\n{trainer}")
    assert (code, err) == (0, "")
    rewards = [float(reward) for _, reward, _ in STEP.findall(out)]
    assert len(rewards) == 5
    assert rewards[-1] > rewards[0] + 0.5
    assert "trainer" in out, "the trainer's own engine made some"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_what_the_trainer_of_the_guide_saves_is_replayed(tmp_path: Path) -> None:
    """The two lines that the page adds are put into its trainer, which has ended when its responses are scored."""
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(CONFIG)
    retains, saves = (next(re.finditer(pattern, PAGE))[0] for pattern in (r"hub\.retain\(.*?\)", r"batch\.save\(.*?\)"))
    trainer = TRAINER.replace("    policy.publish()\n", f"    policy.publish()\n    {retains}\n", 1)
    trainer = trainer.replace("            batch.done()\n", f"            {saves}\n            batch.done()\n", 1)
    async with running_hub(tmp_path / "hub", 1, rollouts=LocalRollouts(2, model=model)) as hub:
        code, _, err = await hub.run(f"import os\nos.chdir({str(tmp_path)!r})\n{trainer}")
        assert (code, err) == (0, "")
        code, out, _ = await hub.command("replay", tmp_path / "rollouts.jsonl", "--model", model)
    assert (code, out.splitlines()[-2]) == (0, "320 responses (5120 tokens in 320 runs): 320 confirmed")
    assert [line.split()[:2] for line in out.splitlines()[1:6]] == [[str(version), "64"] for version in range(1, 6)]


@pytest.mark.slow
async def test_the_engine_of_the_guide_generates(tmp_path: Path) -> None:
    (tmp_path / "counting_engine.py").write_text(ENGINE)
    rollouts = LocalRollouts(1, "counting_engine:load")
    async with running_hub(tmp_path / "hub", 1, rollouts=rollouts, settings={"PYTHONPATH": str(tmp_path)}) as hub:
        code, out, err = await hub.run(COUNT)
    assert (code, out, err) == (0, "[40, 41, 42] None\n", "")
