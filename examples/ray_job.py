"""A trainer on a Ray cluster, whose engines generate on any of its nodes.

python examples/ray_job.py --model my-model --runners 2

A hub comes up on the cluster, and the trainer is a task that Ray puts where it has room. Kill a node while it runs: its
responses go on elsewhere.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tensorhub
from tensorhub.integrations.ray import connect, start_hub

WANTED = 7  # the reward of a response: how many of its tokens are this one


def train(config: Any, steps: int) -> int | None:  # noqa: ANN401 (transformers' own class)
    """Train for some steps on whichever node this runs; return the last version."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with connect() as hub:  # to the agent of this node
        policy = hub.register("policy", model, replica="trainer", resume="values")
        policy.publish()
        rollouts = hub.rollouts("policy", group_size=8, sampling=tensorhub.Sampling(max_tokens=16, seed=1))
        for step in range(steps):
            rollouts.submit([tensorhub.Prompt([1, 2, 3 + number]) for number in range(8)])
            for batch in rollouts.batches(min_responses=64, wait_s=300):
                rewards = torch.tensor([float((each.token_ids == WANTED).sum()) for each in batch.responses])
                loss = loss_of(model, batch.responses, rewards)
                optimizer.zero_grad()
                loss.backward()
                with policy.overwriting(publish=True):
                    optimizer.step()
                batch.done()
                print(f"step {step}: {len(rewards)} responses, reward {rewards.mean():.2f}")
        return policy.version


def loss_of(model: Any, responses: Sequence[tensorhub.Response], rewards: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return the policy gradient's loss of responses that are equally long."""
    ids = torch.tensor([[*each.prompt_ids, *each.token_ids] for each in responses])
    made = ids[:, len(responses[0].prompt_ids) :]
    logits = model(ids[:, :-1]).logits[:, -made.shape[1] :]
    logprobs = torch.log_softmax(logits, -1).gather(2, made[:, :, None])[:, :, 0]
    return -((rewards - rewards.mean())[:, None] * logprobs).sum(1).mean()


def main() -> None:
    """Bring up a hub on the cluster, train, and take the hub down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder of the model's config.json")
    parser.add_argument("--runners", type=int, default=1, help="how many runners, each beside an agent of its own")
    parser.add_argument("--gpus", type=float, default=0, help="how many GPUs each runner takes")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    ray.init()  # the cluster that RAY_ADDRESS names, or a new one on this machine
    takes = {"CPU": 1.0, "GPU": options.gpus} if options.gpus else {"CPU": 1.0}
    with start_hub(runners=options.runners, model=options.model, runner_resources=takes):
        config = AutoConfig.from_pretrained(options.model)
        version = ray.get(ray.remote(train).remote(config, options.steps))
    print(f"the trainer's last version is {version}")


if __name__ == "__main__":
    main()
