"""Rules for a decoder's layers: attention, and what follows it. Pure.

Attention: the heads are divided by rows of q, k and v and by columns of o, as in vLLM. With fewer key and value heads
than ranks, each of them is on several ranks in a row. The norms are whole everywhere, and so is the bias of o, which
only the first rank adds. There are rules for latent attention as well.

After attention there is a dense network, or there are experts, in stacks or each by itself. gate and up are divided by
rows, down by columns. The bias of down is whole. A stack has one expert at each index of its first dimension:
`w13_weight` is gate and then up of each expert, `w2_weight` is down.
"""

from tensorhub.mapping.cuts import Cut, share
from tensorhub.mapping.nodes import AS_IT_IS, Concat, Node, Stack, Tensor, concat, tensor
from tensorhub.mapping.ranks import Ranks
from tensorhub.mapping.rules import Rule
from tensorhub.mapping.sizes import Latent, Sizes

ATTENTION = "model.layers.{layer}.self_attn"
KIND = "{kind:weight|bias}"
"""What a rule for rows matches: the matrix, and the bias, which is divided like its rows."""


def qkv_cuts(sizes: Sizes, ranks: Ranks) -> dict[str, Cut]:
    """Return the rows of q, k and v that a rank has. Raises `ValueError` when the heads can't be divided."""
    rank, count = ranks.tp
    heads = share(sizes.heads, rank, count, "num_attention_heads")
    if count > sizes.kv_heads:
        if count % sizes.kv_heads:
            raise ValueError(f"{sizes.kv_heads} key and value heads can't be divided equally among {count} ranks")
        kv_heads = share(sizes.kv_heads, rank // (count // sizes.kv_heads), sizes.kv_heads)
    else:
        kv_heads = share(sizes.kv_heads, rank, count, "num_key_value_heads")
    return {
        "q_proj": _rows(heads, sizes.head_dim),
        "k_proj": _rows(kv_heads, sizes.head_dim),
        "v_proj": _rows(kv_heads, sizes.head_dim),
    }


def attention(sizes: Sizes, ranks: Ranks) -> tuple[Rule, ...]:
    """Return the rules for q, k, v and o, each by itself, and for the norms of q and k."""
    cuts = qkv_cuts(sizes, ranks)
    return (
        *(Rule(f"{ATTENTION}.{name}.{KIND}", tensor("{name}", cut)) for name, cut in cuts.items()),
        *_output(cuts["q_proj"]),
        Rule(f"{ATTENTION}.{{norm:q_norm|k_norm}}.weight", AS_IT_IS),
    )


def fused_attention(sizes: Sizes, ranks: Ranks) -> tuple[Rule, ...]:
    """Return the rules for q, k and v in one, and for o."""
    cuts = qkv_cuts(sizes, ranks)
    qkv = concat(*(tensor(f"{ATTENTION}.{name}.{{kind}}", cut) for name, cut in cuts.items()))
    return (
        Rule(f"{ATTENTION}.qkv_proj.{KIND}", qkv),
        *_output(cuts["q_proj"]),
        Rule(f"{ATTENTION}.{{norm:q_norm|k_norm}}.weight", AS_IT_IS),
    )


def latent_attention(sizes: Latent, ranks: Ranks) -> tuple[Rule, ...]:
    """Return the rules for multi-head latent attention, the first projections each by itself."""
    heads = share(sizes.heads, *ranks.tp, "num_attention_heads")
    query = _rows(heads, sizes.nope_dim + sizes.rope_dim)
    return (
        Rule(f"{ATTENTION}.{{first:q_a_proj|kv_a_proj_with_mqa}}.{KIND}", AS_IT_IS),
        Rule(f"{ATTENTION}.{{norm:q_a_layernorm|kv_a_layernorm}}.weight", AS_IT_IS),
        Rule(f"{ATTENTION}.{{query:q_proj|q_b_proj}}.{KIND}", tensor("{name}", query)),
        Rule(f"{ATTENTION}.kv_b_proj.{KIND}", tensor("{name}", _rows(heads, sizes.nope_dim + sizes.v_dim))),
        *_output(_rows(heads, sizes.v_dim)),
    )


def fused_latent_attention(sizes: Latent, ranks: Ranks) -> tuple[Rule, ...]:
    """Return the rules for multi-head latent attention, the first projections in one where the query has a low rank."""
    if sizes.q_rank is None:
        return latent_attention(sizes, ranks)
    first: Node = concat(
        _whole(f"{ATTENTION}.q_a_proj.{{kind}}", sizes.q_rank),
        _whole(f"{ATTENTION}.kv_a_proj_with_mqa.{{kind}}", sizes.kv_rank + sizes.rope_dim),
    )
    return Rule(f"{ATTENTION}.fused_qkv_a_proj.{KIND}", first), *latent_attention(sizes, ranks)


def _output(columns: Cut) -> tuple[Rule, ...]:
    return (
        Rule(f"{ATTENTION}.o_proj.weight", tensor("{name}", None, columns)),
        Rule(f"{ATTENTION}.o_proj.bias", AS_IT_IS),
    )


def _whole(name: str, rows: int) -> Tensor:
    return tensor(name, Cut(rows, 0, rows))


def _rows(heads: Cut, head_dim: int) -> Cut:
    """Return the rows of some heads."""
    return Cut(heads.size * head_dim, heads.start * head_dim, heads.stop * head_dim)


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
