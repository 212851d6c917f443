"""Ready mappings for families of models: what a rank of vLLM, or of a Hugging Face model divided alike, has registered.

Global names and shapes are those of the model's checkpoint in Hugging Face naming, with each expert by itself. Each
function takes the model's configuration (a dict, an object with attributes, or the path of config.json), the engine
("vllm": fused names; "hf": the model's own) and the ranks of this process, and raises `ValueError` when they don't go
together. For vLLM the weights are taken as its loaders fill them, unquantised; what a kernel repacks or derives after
that is the engine's to do again.
"""

from collections.abc import Callable, Iterable
from typing import Final, Literal, TypedDict, Unpack

from tensorhub.mapping.cuts import Padded
from tensorhub.mapping.decoder_rules import (
    SHARED,
    attention,
    dense,
    expert_stacks,
    experts,
    fused_attention,
    fused_latent_attention,
    latent_attention,
    router,
)
from tensorhub.mapping.fp8 import Fp8
from tensorhub.mapping.model_config import Config, lookup_of
from tensorhub.mapping.nodes import AS_IT_IS, tensor
from tensorhub.mapping.ranks import Ranks, chosen_experts, experts_of, stage
from tensorhub.mapping.rules import LEFT_OUT, Mapping, Numbers, Rule
from tensorhub.mapping.sizes import Lookup, Sizes, experts_sizes_of, latent_sizes_of, sizes_of

Engine = Literal["vllm", "hf"]

EMBEDDING: Final = "model.embed_tokens.weight"

_LEFT_OUT: Final = tuple(
    Rule(name, LEFT_OUT)
    for name in (
        # Tables of positions, which each side computes for itself.
        "{*path}.rotary_emb.{table}",
        # vLLM's scales of the key-value cache, and its tables of experts' places.
        "{*path}.attn.{scale:_q_scale|_k_scale|_v_scale|_prob_scale}",
        "{*path}.mla_attn.{scale:_q_scale|_k_scale|_v_scale|_prob_scale}",
        "{*path}.{table:_expert_map|expert_map|expert_mask}",
    )
)


class Options(TypedDict, total=False):
    """What every family takes by keyword, beside its configuration and engine. All have defaults."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    ep_rank: int
    ep_size: int
    expert_tp_rank: int | None
    """The rank among those that divide each expert, where it is not `tp_rank` without and 0 with expert parallelism."""
    expert_tp_size: int | None
    layers: range | None
    """The layers of this pipeline stage, where they are not given out as vLLM does it."""
    layers_from_zero: bool
    """Whether the stage counts its layers from zero. vLLM and Hugging Face count them through all stages."""
    placement: str
    """How experts are given out: "linear" or "round_robin"."""
    local_experts: Iterable[int] | None
    """The experts in this rank's stacks in their order, one of them perhaps twice, where neither is how."""
    shared_experts_divided: bool
    """False where each rank has all of the shared experts: vLLM's sequence parallelism."""
    unknown: Literal["refuse", "keep"]
    """What becomes of a tensor that no rule is for: an error, or a global tensor of its own name."""
    quantise: Fp8 | None
    """How weights that are fp8 with scales here come of the published ones: `mapping.fp8("fp8-block-128")`."""


_RANKS: Final = frozenset(Ranks.__struct_fields__)


class _Model:
    """A configuration, an engine and ranks, and the rules that follow from them."""

    def __init__(self, family: str, config: Config, engine: Engine, options: Options) -> None:
        if engine not in ("vllm", "hf"):
            raise ValueError(f"engine is {engine!r:.80}; possible are 'vllm' and 'hf'")
        unknown = options.keys() - Options.__annotations__.keys()
        if unknown:
            raise TypeError(f"there is no option {min(unknown)!r}; possible are {', '.join(Options.__annotations__)}")
        self.family, self.engine, self.options = family, engine, options
        self.lookup: Lookup = lookup_of(config)
        self.sizes: Sizes = sizes_of(self.lookup)
        self.ranks = Ranks(**{name: options[name] for name in _RANKS & options.keys()})  # type: ignore[literal-required]

    @property
    def is_fused(self) -> bool:
        return self.engine == "vllm"

    def attention(self) -> tuple[Rule, ...]:
        return (fused_attention if self.is_fused else attention)(self.sizes, self.ranks)

    def latent_attention(self) -> tuple[Rule, ...]:
        sizes = latent_sizes_of(self.lookup)
        return (fused_latent_attention if self.is_fused else latent_attention)(sizes, self.ranks)

    def dense(self) -> tuple[Rule, ...]:
        return dense(self.sizes.intermediate, *self.ranks.tp, fused=self.is_fused)

    def experts(self) -> tuple[Rule, ...]:
        sizes = experts_sizes_of(self.lookup)
        chosen = self.options.get("local_experts")
        placement = self.options.get("placement", "linear")
        mine = experts_of(sizes.count, self.ranks.ep_rank, self.ranks.ep_size, placement)
        if chosen is not None:
            mine = chosen_experts(chosen, sizes.count)
        rules = (expert_stacks if self.is_fused else experts)(mine, sizes.intermediate, *self.ranks.expert_tp)
        if not sizes.shared_intermediate:
            return *router(), *rules
        shared_tp = self.ranks.tp if self.options.get("shared_experts_divided", True) else (0, 1)
        shared = dense(sizes.shared_intermediate, *shared_tp, at=SHARED, fused=self.is_fused)
        return *router(), *rules, *shared

    def mapping(self, *layers: Rule) -> Mapping:
        """Return the mapping of these rules for layers, and of those for all that is around them."""
        all_layers = range(self.sizes.layers)
        mine = self.options.get("layers")
        if mine is None:
            mine = stage(self.sizes.layers, self.ranks.pp_rank, self.ranks.pp_size)
        if mine.step != 1 or not set(mine) <= set(all_layers):
            raise ValueError(f"layers are {mine}; they follow one another, from 0 to {self.sizes.layers - 1}")
        shift = mine.start if self.options.get("layers_from_zero", False) else 0
        return Mapping(
            title=f"{self.family} for {self.engine}, {self.ranks.told}",
            rules=(*layers, *self._around(), *_LEFT_OUT),
            numbers=(Numbers("layer", mine.start, mine.stop, shift),),
            unknown=self.options.get("unknown", "refuse"),
            quantise=self.options.get("quantise"),
        )

    def _around(self) -> tuple[Rule, ...]:
        vocabulary = Padded(self.sizes.vocabulary, *self.ranks.tp)
        layer = "model.layers.{layer}"
        return (
            Rule(f"{layer}.{{norm:input_layernorm|post_attention_layernorm}}.weight", AS_IT_IS),
            Rule("model.norm.weight", AS_IT_IS),
            Rule(EMBEDDING, tensor("{name}", vocabulary)),
            Rule("lm_head.weight", tensor(EMBEDDING if self.sizes.tied else "{name}", vocabulary)),
            Rule("lm_head.bias", tensor("{name}", vocabulary)),
        )


def llama(config: Config, engine: Engine = "vllm", **options: Unpack[Options]) -> Mapping:
    """Return the mapping of Llama models, and of those built like it (Mistral): with or without biases, tied or not."""
    model = _Model("llama", config, engine, options)
    return model.mapping(*model.attention(), *model.dense())


def qwen2(config: Config, engine: Engine = "vllm", **options: Unpack[Options]) -> Mapping:
    """Return the mapping of Qwen2 models: q, k and v have biases."""
    model = _Model("qwen2", config, engine, options)
    return model.mapping(*model.attention(), *model.dense())


def qwen3(config: Config, engine: Engine = "vllm", **options: Unpack[Options]) -> Mapping:
    """Return the mapping of Qwen3 models: heads of their own size, with norms of q and k."""
    model = _Model("qwen3", config, engine, options)
    return model.mapping(*model.attention(), *model.dense())


def qwen3_moe(config: Config, engine: Engine = "vllm", **options: Unpack[Options]) -> Mapping:
    """Return the mapping of Qwen3's mixtures of experts, some of whose layers may be dense."""
    model = _Model("qwen3_moe", config, engine, options)
    return model.mapping(*model.attention(), *model.experts(), *model.dense())


def deepseek_v3(config: Config, engine: Engine = "vllm", **options: Unpack[Options]) -> Mapping:
    """Return the mapping of DeepSeek's V2 and V3: latent attention; dense layers, then experts with shared ones."""
    model = _Model("deepseek_v3", config, engine, options)
    return model.mapping(*model.latent_attention(), *model.experts(), *model.dense())


FAMILIES: Final[dict[str, Callable[..., Mapping]]] = {
    "deepseek_v2": deepseek_v3,
    "deepseek_v3": deepseek_v3,
    "llama": llama,
    "mistral": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
"""By `model_type` of the configuration."""


def for_model(config: Config, engine: Engine = "vllm", **options: Unpack[Options]) -> Mapping:
    """Return the mapping of the family that the configuration's `model_type` names. Raises `ValueError` for others."""
    kind = lookup_of(config)("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ValueError(
            f"there is no ready mapping for models of type {kind!r:.80}; there are those for {', '.join(FAMILIES)}. "
            "Build one with tensorhub.mapping.Rule and Mapping"
        )
    return family(config, engine, **options)
