"""Rules for what follows a decoder's attention: a dense network, or experts in stacks or each by itself. Pure.

gate and up are divided by rows, down by columns; the bias of down is whole. A stack has one expert at each index of its
first dimension: `w13_weight` is gate and then up of each, `w2_weight` is down.
"""

from tensorhub.mapping.cuts import Cut, share
from tensorhub.mapping.decoder_rules import KIND
from tensorhub.mapping.nodes import AS_IT_IS, Concat, Stack, Tensor, concat, tensor
from tensorhub.mapping.rules import Rule

MLP = "model.layers.{layer}.mlp"
SHARED = f"{MLP}.shared_experts"
EXPERT = f"{MLP}.experts.{{expert}}"

STACKS = (f"{MLP}.experts", f"{MLP}.experts.routed_experts")
"""Where vLLM's versions have an expert stack."""


def dense(intermediate: int, rank: int, ranks: int, *, at: str = MLP, fused: bool) -> tuple[Rule, ...]:
    """Return the rules for a dense network at `at`: gate and up fused in one, or each by itself."""
    cut = share(intermediate, rank, ranks, "intermediate_size")
    both = concat(tensor(f"{at}.gate_proj.{{kind}}", cut), tensor(f"{at}.up_proj.{{kind}}", cut))
    rows = (
        Rule(f"{at}.gate_up_proj.{KIND}", both)
        if fused
        else Rule(f"{at}.{{half:gate_proj|up_proj}}.{KIND}", tensor("{name}", cut))
    )
    return (
        rows,
        Rule(f"{at}.down_proj.weight", tensor("{name}", None, cut)),
        Rule(f"{at}.down_proj.bias", AS_IT_IS),
    )


def router() -> tuple[Rule, ...]:
    """Return the rules for what chooses the experts; in vLLM its bias may be found with the experts first."""
    correction = "e_score_correction_bias"
    return (
        Rule(f"{MLP}.gate.{{kind:weight|bias|{correction}}}", AS_IT_IS),
        *(Rule(f"{stack}.{correction}", tensor(f"{MLP}.gate.{correction}")) for stack in STACKS),
    )


def expert_stacks(mine: tuple[int, ...], intermediate: int, rank: int, ranks: int) -> tuple[Rule, ...]:
    """Return the rules for vLLM's two stacks of the experts that a rank has."""
    gate_up, down = _stacks(mine, share(intermediate, rank, ranks, "moe_intermediate_size"))
    return tuple(
        rule for stack in STACKS for rule in (Rule(f"{stack}.w13_weight", gate_up), Rule(f"{stack}.w2_weight", down))
    )


def experts(mine: tuple[int, ...], intermediate: int, rank: int, ranks: int) -> tuple[Rule, ...]:
    """Return the rules for transformers' experts: in stacks from its version 5 on, before that each by itself."""
    cut = share(intermediate, rank, ranks, "moe_intermediate_size")
    gate_up, down = _stacks(mine, cut)
    return (
        Rule(f"{MLP}.experts.gate_up_proj", gate_up),
        Rule(f"{MLP}.experts.down_proj", down),
        Rule(f"{EXPERT}.{{half:gate_proj|up_proj}}.weight", tensor("{name}", cut)),
        Rule(f"{EXPERT}.down_proj.weight", tensor("{name}", None, cut)),
    )


def _stacks(mine: tuple[int, ...], cut: Cut) -> tuple[Stack, Stack]:
    gate_up: Concat = concat(tensor(f"{EXPERT}.gate_proj.weight", cut), tensor(f"{EXPERT}.up_proj.weight", cut))
    down: Tensor = tensor(f"{EXPERT}.down_proj.weight", None, cut)
    return Stack("expert", mine, gate_up), Stack("expert", mine, down)
