"""One of two tensor-parallel ranks, in a process of its own: SGLang's own model and updater, without its server.

`python ranks.py MODEL RANK FOLDER` reads from its input what an update brings to the rank, and prints a line for each.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.test.parallel_groups import parallel_scope, publish
from transformers import AutoConfig

RANKS = 2


def main(model: str, rank: int, folder: str) -> None:
    """Follow the input's updates. Each is answered by the names of the tensors that are not what they should be."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    options: dict[str, Any] = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32"}
    args = ServerArgs(model_path=model, device="cpu", tp_size=RANKS, skip_tokenizer_init=True, **options)
    args.resolve_once()
    publish(args, role="scheduler")
    alone = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
    world = torch.distributed.group.WORLD
    both = SimpleNamespace(rank_in_group=rank, world_size=RANKS, cpu_group=world)
    groups = {f"{name}_group": both for name in ("tp", "attn_tp", "moe_tp")}
    places = {"tp_rank": rank, "attn_tp_rank": rank, "tp_size": RANKS, "attn_tp_size": RANKS}
    with parallel_scope(pp_group=alone, moe_ep_group=alone, **groups, **places):
        own = Qwen2ForCausalLM(AutoConfig.from_pretrained(model))
        for line in sys.stdin:
            asked = json.loads(line)
            updater = WeightUpdater(
                tp_rank=rank,
                device="cpu",
                gpu_id=0,
                model_config=None,
                custom_weight_loaders=[asked["load_format"]],
                get_model=lambda: own,
                update_model_fields=lambda **_: None,
                recapture_cuda_graph=lambda: None,
                get_model_runner=lambda: None,
            )
            payload = MultiprocessingSerializer.deserialize(asked["serialized_named_tensors"][rank])
            updater.begin_weight_update()
            done, _ = updater.update_weights_from_tensor(payload, asked["load_format"])
            updater.end_weight_update(run_post_load=False)
            whole = torch.load(asked["whole"])
            print(json.dumps([done, differing(dict(own.named_parameters()), whole, rank)]), flush=True)


def differing(own: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], rank: int) -> list[str]:
    """Return the names of a rank's tensors that are not its part of the whole."""
    return [name for name, part in own.items() if not torch.equal(part, part_of(name, whole, rank))]


def part_of(name: str, whole: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """Return what a rank has of a tensor, as tensor parallelism cuts it."""
    for merged, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if merged in name:
            return torch.cat([whole[name.replace(merged, each)].chunk(RANKS)[rank] for each in parts])
    if "embed_tokens" in name or "lm_head" in name:
        return whole[name].chunk(RANKS)[rank]
    if "o_proj" in name or "down_proj" in name:
        return whole[name].chunk(RANKS, 1)[rank]
    return whole[name]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
