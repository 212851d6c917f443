"""The ready mappings against what vLLM's loaders do, for models and ranks at random: each element, exactly once."""

from collections.abc import Mapping as Values
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.vllm_loading import Array, Shape, Worker, checkpoint

from tensorhub import mapping
from tensorhub.mapping import Mapping
from tensorhub_common.layout.layout import TensorEntry, layout_of, shared_mismatch

Ranks = dict[str, Any]
Worked = tuple[Shape, Ranks]
"""A model as one worker has it, and what its mapping is told of the worker."""

FAMILY = {"dense": mapping.qwen3, "moe": mapping.qwen3_moe, "latent": mapping.deepseek_v3}


def config_of(m: Shape) -> dict[str, Any]:
    return {
        "num_hidden_layers": m.layers,
        "hidden_size": m.hidden,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "intermediate_size": m.intermediate,
        "vocab_size": m.vocabulary,
        "tie_word_embeddings": m.tied,
        "n_routed_experts" if m.latent else "num_experts": m.experts or None,
        "moe_intermediate_size": m.expert_intermediate or None,
        "n_shared_experts": m.shared or None,
        "q_lora_rank": m.q_rank,
        "kv_lora_rank": m.kv_rank or None,
        "qk_nope_head_dim": m.nope or None,
        "qk_rope_head_dim": m.rope or None,
        "v_head_dim": m.v_dim or None,
    }


@st.composite
def _models(draw: st.DrawFn) -> list[Worked]:
    tp = draw(st.sampled_from((1, 2, 3, 4, 8)))
    kind = draw(st.sampled_from(tuple(FAMILY)))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n % tp == 0 or tp % n == 0]))
    heads = np.lcm(kv_heads, tp) * draw(st.integers(1, 2))
    model: dict[str, Any] = {
        "layers": 2,
        "hidden": draw(st.integers(1, 4)),
        "heads": int(heads),
        "kv_heads": kv_heads,
        "head_dim": draw(st.integers(1, 3)),
        "intermediate": tp * draw(st.integers(1, 3)),
        "vocabulary": draw(st.integers(1, 40)),
        "padding_to": tp * draw(st.integers(1, 16)),
        "tp_size": tp,
        "bias": draw(st.booleans()) and kind == "dense",
        "tied": draw(st.booleans()),
    }
    ep, redundant = 1, 0
    if kind != "dense":
        ep = draw(st.sampled_from((1, tp, 2 * tp)))
        model |= {
            "experts": draw(st.integers(max(1, ep), 9 + ep)),
            "expert_intermediate": tp * draw(st.integers(1, 2)),
            "dense_layers": draw(st.integers(0, 1)),
            "stack": draw(st.sampled_from(("experts", "experts.routed_experts"))),
        }
        redundant = draw(st.integers(0, 2))
    if kind == "latent":
        model |= {
            "latent": True,
            "shared": draw(st.integers(0, 2)),
            "q_rank": draw(st.none() | st.integers(1, 3)),
            "kv_rank": draw(st.integers(1, 3)),
            "nope": draw(st.integers(1, 3)),
            "rope": draw(st.integers(1, 2)),
            "v_dim": draw(st.integers(1, 3)),
        }
    round_robin = draw(st.booleans())
    workers = []
    for rank in range(max(tp, ep)):
        shape, ep_rank = dict(model), rank if ep > 1 else 0
        ranks: Ranks = {"tp_rank": rank % tp, "tp_size": tp, "ep_rank": ep_rank, "ep_size": ep}
        if kind != "dense":
            mine = _placed(model["experts"], ep_rank, ep, round_robin=round_robin)
            ranks |= {"placement": "round_robin" if round_robin else "linear"}
            if redundant:
                mine = mine + mine[:redundant]
                ranks |= {"local_experts": mine}
            shape |= {"expert_map": mine, "expert_tp": (rank % tp, tp) if ep == 1 else (0, 1)}
        workers.append((Shape(**shape, tp_rank=rank % tp), ranks))
    return workers


def _placed(experts: int, rank: int, ranks: int, *, round_robin: bool) -> tuple[int, ...]:
    if round_robin:
        return tuple(number for number in range(experts) if number % ranks == rank)
    counts = [experts // ranks + (1 if place < experts % ranks else 0) for place in range(ranks)]
    return tuple(range(sum(counts[:rank]), sum(counts[: rank + 1])))


def mapping_of(model: Shape, engine: Any, ranks: Ranks) -> Mapping:
    kind = "latent" if model.latent else "moe" if model.experts else "dense"
    return FAMILY[kind](config_of(model), engine, **ranks)


def entry(name: str, array: Array) -> TensorEntry:
    return TensorEntry(name, "int64", 8, array.shape, array.shape, (0,) * array.ndim)


def boxes(entry: TensorEntry) -> list[tuple[str, tuple[slice, ...], tuple[slice, ...], tuple[int, ...]]]:
    """Return the global tensor, the box there, the box here and its shape here, for each part but padding."""
    if 0 in entry.shape:
        return []
    if not entry.parts:
        here = tuple(slice(0, size) for size in entry.shape)
        return [(entry.name, _slices(entry.offset, entry.shape), here, entry.shape)]
    return [
        (part.name, _slices(part.offset, part.extent), _slices(part.start, part.shape), part.shape)
        for part in entry.parts
        if not part.is_padding
    ]


def _slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))


def filled(entry: TensorEntry, weights: Values[str, Array]) -> Array:
    """Return a registered tensor as a read by parts fills it; padding is zero, and what nobody fills is -2."""
    array = np.full(entry.shape, -2, np.int64)
    for part in entry.parts:
        if part.is_padding:
            array[_slices(part.start, part.shape)] = 0
    for name, there, here, shape in boxes(entry):
        array[here] = weights[name][there].reshape(shape)
    return array


@pytest.mark.long
@given(workers=_models())
def test_each_rank_of_vllm_gets_what_its_loaders_would_have_left(workers: list[Worked]) -> None:
    weights = checkpoint(workers[0][0])
    seen = {name: np.zeros(array.shape, np.int64) for name, array in weights.items()}
    layouts = []
    for model, ranks in workers:
        names = mapping_of(model, "vllm", ranks)
        entries = []
        for name, loaded in Worker(model).load(weights).items():
            assert -1 not in loaded, "the reference itself left something out"
            mapped = names.entry(entry(name, loaded))
            assert mapped is not None
            entries.append(mapped)
            np.testing.assert_array_equal(filled(mapped, weights), loaded, err_msg=name)
            for source, there, _, _ in boxes(mapped):
                seen[source][there] += 1
        layouts.append(layout_of(entries))
    _count(workers, seen)
    for layout in layouts[1:]:
        assert shared_mismatch(layouts[0], layout) is None
    _assert_engine_gives_all_back(workers, weights)


def _count(workers: list[Worked], seen: dict[str, Array]) -> None:
    """Each element of the checkpoint stands exactly as often as its kind is replicated."""
    model = workers[0][0]
    for name, count in seen.items():
        if name == "lm_head.weight" and model.tied:
            assert not count.any()
        elif ".experts." in name:
            number = int(name.split(".experts.")[1].split(".")[0])
            # Divided among the ranks of one group, or whole on each that has it.
            placed = sum(model.expert_map.count(number) for model, _ in workers)
            each = placed // model.expert_tp[1]
            assert (count == each).all(), name
        else:
            assert (count == _replicas(name, model, len(workers))).all(), name


def _replicas(name: str, m: Shape, workers: int) -> int:
    """Return on how many workers each element of a tensor outside of the experts stands."""
    groups = workers // m.tp_size
    if any(word in name for word in (".k_proj.", ".v_proj.")):
        return groups * max(1, m.tp_size // m.kv_heads)
    by_rows = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
    by_columns = ("o_proj.weight", "down_proj.weight")
    return groups if any(word in name for word in by_rows) or name.endswith(by_columns) else workers


def _assert_engine_gives_all_back(workers: list[Worked], weights: dict[str, Array]) -> None:
    """The same parts, read the other way, bring the checkpoint together from the engine's ranks."""
    back = {name: np.full(array.shape, -1) for name, array in weights.items()}
    for model, ranks in workers:
        names = mapping_of(model, "vllm", ranks)
        for name, loaded in Worker(model).load(weights).items():
            mapped = names.entry(entry(name, loaded))
            assert mapped is not None
            for source, there, here, _ in boxes(mapped):
                back[source][there] = loaded[here].reshape(back[source][there].shape)
    if workers[0][0].tied:
        del back["lm_head.weight"]
    for name, array in back.items():
        np.testing.assert_array_equal(array, weights[name], err_msg=name)


@given(workers=_models(), stacked=st.booleans())
def test_a_hugging_face_model_is_divided_alike(workers: list[Worked], *, stacked: bool) -> None:
    """A rank has of q_proj what is q in vLLM's qkv_proj, and so with all the others."""
    weights = checkpoint(workers[0][0])
    for model, ranks in workers:
        names = mapping_of(model, "hf", ranks)
        own = _unfused(model, Worker(model).load(weights), stacked=stacked)
        for name, loaded in own.items():
            mapped = names.entry(entry(name, loaded))
            assert mapped is not None
            np.testing.assert_array_equal(filled(mapped, weights), loaded, err_msg=name)


def _unfused(m: Shape, loaded: dict[str, Array], *, stacked: bool) -> dict[str, Array]:
    """Take vLLM's tensors apart again, into the names of transformers: stacks of experts, or each by itself."""
    own: dict[str, Array] = {}
    heads, kv_heads = m.heads // m.tp_size, max(1, m.kv_heads // m.tp_size)
    for name, array in loaded.items():
        if "qkv_proj" in name:
            cuts = np.array([heads, heads + kv_heads]) * m.head_dim
            for word, part in zip("qkv", np.split(array, cuts), strict=True):
                own[name.replace("qkv_proj", f"{word}_proj")] = part
        elif "gate_up_proj" in name:
            for word, part in zip(("gate_proj", "up_proj"), np.split(array, 2), strict=True):
                own[name.replace("gate_up_proj", word)] = part
        elif "fused_qkv_a_proj" in name:
            for word, part in zip(("q_a_proj", "kv_a_proj_with_mqa"), np.split(array, [m.q_rank or 0]), strict=True):
                own[name.replace("fused_qkv_a_proj", word)] = part
        elif name.endswith(("w13_weight", "w2_weight")):
            own |= _experts(m, name, array, stacked=stacked)
        else:
            own[name] = array
    return own


def _experts(m: Shape, name: str, array: Array, *, stacked: bool) -> dict[str, Array]:
    at = name[: name.index(".experts")] + ".experts"
    is_down = name.endswith("w2_weight")
    if stacked:
        return {f"{at}.{'down_proj' if is_down else 'gate_up_proj'}": array}
    words = ["down_proj"] if is_down else ["gate_proj", "up_proj"]
    return {
        f"{at}.{number}.{word}.weight": part
        for place, number in enumerate(m.expert_map)
        for word, part in zip(words, np.split(array[place], len(words)), strict=True)
    }


@given(workers=_models(), data=st.data())
def test_a_box_of_a_registered_tensor_has_the_parts_of_its_box(workers: list[Worked], data: st.DataObject) -> None:
    """A DTensor's shard of a fused tensor, say: any box of it, empty ones too."""
    model, ranks = data.draw(st.sampled_from(workers))
    names, weights = mapping_of(model, "vllm", ranks), checkpoint(model)
    for name, loaded in Worker(model).load(weights).items():
        start = tuple(data.draw(st.integers(0, size)) for size in loaded.shape)
        stop = tuple(data.draw(st.integers(at, size)) for at, size in zip(start, loaded.shape, strict=True))
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        mapped = names.entry(TensorEntry(name, "int64", 8, shape, loaded.shape, start))
        assert mapped is not None
        layout_of([mapped])
        box = loaded[_slices(start, shape)]
        np.testing.assert_array_equal(filled(mapped, weights), box, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 24])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_all_ways_to_cut_a_dimension_cover_it_once(size: int, ranks: int) -> None:
    import torch  # noqa: PLC0415 (the one test here that asks it)

    chunks = [mapping.chunk(size, rank, ranks) for rank in range(ranks)]
    expected = [piece.tolist() for piece in torch.arange(size).chunk(ranks)]
    assert [list(range(cut.start, cut.stop)) for cut in chunks if cut.length] == expected
    if size % ranks == 0:
        shares = [mapping.share(size, rank, ranks) for rank in range(ranks)]
        assert [n for cut in shares for n in range(cut.start, cut.stop)] == list(range(size))
