"""A model that computes rows of many sequences, with weights that others write.

It computes with a *twin* of the model that it was given: the same modules, with attention replaced (`attention`). The
given model is never changed.

- To compute as the weights are, the twin has the very Parameter objects of the model, so it reads what others wrote.
- To compute in float64, the twin has parameters of its own, which `refresh` fills from the model's.

Buffers are the twin's own in both cases: some rotary embeddings write theirs while they compute.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from tensorhub_common.errors import NotInThisVersion
from tensorhub_runner.engines.attention import PACKED, Rows, exact_rows, is_last, packed_rows
from tensorhub_runner.engines.kv_cache import KvCache
from tensorhub_runner.engines.schedule import Chunk

EXACT_ROWS: Final = 16
"""How many rows a pass has in exact mode. `model_check` asks whether a row is computed alike in each place of such a
pass; where it is not, and where rows are sorted by experts, a pass has one row."""


class PackedModel:
    """A model's twin that computes packed rows."""

    def __init__(self, model: PreTrainedModel, *, is_exact: bool) -> None:
        """Make the twin, in float64 if it `is_exact`, without values in its copies.

        Raises `ValueError` where the model has no memory, or is where exact mode can't be, and `NotInThisVersion` where
        its attention can't be replaced.
        """
        missing = next((name for name, each in model.named_parameters() if each.is_meta), None)
        if missing is not None:
            raise ValueError(f"the parameter {missing!r} has no memory yet: register the model at the hub first")
        self._model, self.is_exact = model, is_exact
        self.exact_rows = 1 if _has_experts(model) else EXACT_ROWS
        """How many rows a pass has in exact mode."""
        self.device = next(model.parameters()).device
        self.dtype = torch.float64 if is_exact else next(model.parameters()).dtype
        if is_exact and self.device.type != "cpu":
            raise ValueError(f"exact mode computes on CPUs alone, and the model is on {self.device}: use the fast mode")
        # What is in the memo already is not copied.
        memo = {id(each): self._parameter(each) for each in model.parameters()}
        twin = copy.deepcopy(model, memo)
        for module in twin.modules():
            for name, buffer in [*module.named_buffers(recurse=False)]:
                module.register_buffer(name, self._buffer(buffer), persistent=False)
        self._twin: PreTrainedModel = twin.eval()
        self._twin.set_attn_implementation(PACKED)
        if is_exact and _has_experts(model):
            # The others have no float64.
            self._twin.set_experts_implementation("eager")
        if self._twin.config._attn_implementation != PACKED:  # noqa: SLF001 (transformers has no public way to ask)
            raise NotInThisVersion(f"{type(model).__name__} has an attention that transformers can't replace")
        self.name = type(model).__name__
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if not self.is_exact or not parameter.is_floating_point():
            return parameter
        return nn.Parameter(torch.empty_like(parameter, dtype=torch.float64), requires_grad=False)

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to(torch.float64) if self.is_exact and buffer.is_floating_point() else buffer

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's parameters and buffers again. Parameters that were replaced by others are found as well."""
        for theirs, ours in zip(self._model.modules(), self._twin.modules(), strict=True):
            for name, parameter in theirs.named_parameters(recurse=False):
                own = ours.get_parameter(name)
                if own is not parameter and (self.is_exact and parameter.is_floating_point()):
                    own.copy_(parameter)
                elif own is not parameter:
                    ours.register_parameter(name, parameter)
            for name, buffer in theirs.named_buffers(recurse=False):
                ours.get_buffer(name).copy_(buffer)

    def compute(self, cache: KvCache, chunks: list[Chunk]) -> list[tuple[Chunk, torch.Tensor]]:
        """Compute chunks, and return the logits behind those that are the last of their sequences: [vocabulary] each.

        In exact mode each pass has `exact_rows` rows, whatever the chunks are, so that each shape that a kernel sees
        follows from the model, or from one row's position in its sequence.
        """
        if not self.is_exact:
            rows, last = packed_rows(cache, chunks, self.device)
            return list(zip(last, self._logits(rows), strict=True))
        tokens = [(each, position) for each in chunks for position in range(each.start, each.start + each.count)]
        made = list[tuple[Chunk, torch.Tensor]]()
        for first in range(0, len(tokens), self.exact_rows):
            part = tokens[first : first + self.exact_rows]
            logits = self._logits(exact_rows(cache, part, self.exact_rows, self.device))
            made += [(chunk, logits[row]) for row, (chunk, position) in enumerate(part) if is_last(chunk, position)]
        return made

    @torch.no_grad()
    def _logits(self, rows: Rows) -> torch.Tensor:
        """Return the logits of the rows that are wanted: [wanted, vocabulary]."""
        out = self._twin(
            input_ids=rows.ids, position_ids=rows.positions, use_cache=False, logits_to_keep=rows.wanted, rows=rows
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    @torch.no_grad()
    def plain_logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits behind the last of a sequence's tokens as transformers has them, without a cache."""
        self._twin.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self._twin(torch.tensor([tokens], device=self.device), use_cache=False).logits
        finally:
            self._twin.set_attn_implementation(PACKED)
        return logits[0, -1]

    @contextmanager
    def recorded(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        """Give what each module makes in each pass: by the module's name and the number of its tensor."""
        passes = list[dict[str, torch.Tensor]]()

        def keep(name: str) -> Callable[[nn.Module, object, object], None]:
            def hook(_: nn.Module, __: object, made: object) -> None:
                tensors = made if isinstance(made, tuple) else (made,)
                passes[-1] |= {
                    f"{name} {number}": each for number, each in enumerate(tensors) if isinstance(each, torch.Tensor)
                }

            return hook

        with ExitStack() as hooks:
            first = self._twin.register_forward_pre_hook(lambda _, __: passes.append({}))
            hooks.callback(first.remove)
            for name, module in self._twin.named_modules():
                hooks.callback(module.register_forward_hook(keep(name)).remove)
            yield passes


def _has_experts(model: PreTrainedModel) -> bool:
    """Tell whether rows are multiplied with those that have the same expert, so that shapes follow from all of them."""
    names = [type(each).__name__.lower() for each in model.modules()]
    return any("expert" in name or "moe" in name for name in names)
