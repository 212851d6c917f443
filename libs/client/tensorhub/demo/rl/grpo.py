"""The loss of GRPO: what a group's responses are worth beside each other, and how far the model may go for it."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tensorhub import Response
from tensorhub.demo.rl.clock import reward

CLIP: Final = 0.2
"""A token whose probability has changed by more than this share gives no gradient."""
DEVIATION_MIN: Final = 1e-4


def grpo_loss(model: nn.Module, responses: Iterable[Response], until: int | None = None) -> torch.Tensor:
    """Return the clipped loss of whole groups, averaged over tokens. Failed responses are left out.

    `until`: the hour that responses are to end with; None: they are to go round the clock.
    """
    groups = defaultdict[str, list[Response]](list)
    for each in responses:
        if each.finish_reason in {"stop", "length"}:
            groups[each.group].append(each)
    device = next(model.parameters()).device
    loss, count = torch.zeros((), device=device), 0
    for group in groups.values():
        rewards = torch.tensor(
            [reward(int(each.prompt_ids[0]), each.token_ids.tolist(), until) for each in group], device=device
        )
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + DEVIATION_MIN)
        prompt = torch.tensor(group[0].prompt_ids.tolist(), device=device).expand(len(group), -1)
        tokens = _padded([torch.tensor(each.token_ids.tolist()) for each in group], device)
        drawn = _padded([torch.tensor(each.logprobs.tolist()) for each in group], device)
        is_token = _padded([torch.ones(len(each.token_ids)) for each in group], device)
        logits = model(input_ids=torch.cat([prompt, tokens], 1)).logits[:, prompt.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
        # Against the weights that drew each token, which are older ones, and not the same for a whole response.
        ratio = (logprobs - drawn).exp()
        gain = torch.minimum(advantages[:, None] * ratio, advantages[:, None] * ratio.clamp(1 - CLIP, 1 + CLIP))
        loss = loss - (gain * is_token).sum()
        count += sum(len(each.token_ids) for each in group)
    return loss / max(1, count)


def _padded(rows: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True).to(device)
