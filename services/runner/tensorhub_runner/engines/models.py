"""Models of transformers, built from a configuration."""

import os
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

LONG_ROPES: Final = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest position of a pass, once that is beyond the original context."""


def build(config: str | os.PathLike[str] | Mapping[str, Any], dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a causal language model without values, from a Hugging Face config.json, its folder, or its content.

    The memory of its parameters is not written, so that it takes none until a version comes from the hub. Buffers that
    transformers computes, as tables of positions, have their values. `dtype` None is the configuration's own.

    Raises `ValueError` where transformers can't make a causal language model of it.
    """
    try:
        if isinstance(config, Mapping):
            made = AutoConfig.for_model(**config)
        else:
            made = AutoConfig.from_pretrained(config, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            wanted = {} if dtype is None else {"dtype": dtype}
            model = AutoModelForCausalLM.from_config(made, trust_remote_code=False, **wanted)
        # Transformers ties when it initialises. A trainer's tied model has one tensor where this would have two.
        model.tie_weights()
    except Exception as error:  # Transformers raises what comes, errors of other libraries too.
        raise ValueError(
            f"transformers makes no causal language model of {config!r}: {error}; give a folder with a config.json"
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def computed_buffers(model: nn.Module) -> frozenset[str]:
    """Return by every name the buffers that a model computes for itself: those that are in no `state_dict()` of it."""
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False)).difference(model.state_dict())


def context_tokens(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model's sequences have at most; None: its configuration does not say.

    A context beyond what its rotary embedding was made for ends there: angles must not depend on the batch.
    """
    config = model.config.get_text_config()
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Some models have one rotary embedding for each type of layers.
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    ends = [each.get("original_max_position_embeddings") for each in ropes if each.get("rope_type") in LONG_ROPES]
    ends.append(getattr(config, "max_position_embeddings", None))
    return min((int(each) for each in ends if each is not None), default=None)
