"""Traces of response lengths: what a trainer recorded, and public ones.

JSON lines name `group` (the prompt's content), `prompt_len` and `out_lens`, and where known the `step` that they were
learned in and `tokens_max`, the limit of a response: one that is as long was cut off. Public traces are read as their
owners publish them:

- Azure's (github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_*.csv, CC-BY-4.0): prompt and response
  lengths of two services in the order of arrival. No prompt is named, so each is its own.
- Sequence Scheduling's (github.com/zhengzangw/Sequence-Scheduling, data/alpaca-*-10k-length.json, no licence is named):
  four responses of Vicuna 7B to each of 10,000 instructions, at temperatures 0, 0.3, 0.5 and 0.7; no prompt lengths.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

TEMPERATURES: Final = ("L_t0.0", "L_t0.3", "L_t0.5", "L_t0.7")
SCHEDULING_TOKENS_MAX: Final = 512
"""Of Sequence Scheduling's responses; longer ones are written down with up to two tokens more."""


class Group(msgspec.Struct, frozen=True):
    """The responses of one prompt in one step. `prompt_len`: in tokens; 0: it is not known."""

    group: str
    prompt_len: int
    out_lens: tuple[int, ...]
    step: int | None = None
    tokens_max: int | None = None


def read(path: Path) -> list[Group]:
    """Return a trace in its order. Raises OSError, and ValueError that says what is wrong with a file."""
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        if text.startswith("TIMESTAMP"):
            found = [*_azure(text)]
        elif text.startswith("["):
            found = [*_scheduling(json.loads(text))]
        else:
            found = [msgspec.json.decode(line, type=Group) for line in text.splitlines() if line]
    except (EOFError, KeyError, TypeError, ValueError, zlib.error) as why:
        raise ValueError(
            "it is no trace, which has JSON lines of group, prompt_len and out_lens, or is a file of Azure's or "
            f"Sequence Scheduling's ({why})"
        ) from why
    if not found:
        raise ValueError("it has no group")
    return found


def windows(trace: list[Group], responses: int) -> Iterator[list[Group]]:
    """Yield the groups of each step; where steps are not told, of so many responses one after the other."""
    window: list[Group] = []
    for each in trace:
        is_full = sum(len(group.out_lens) for group in window) >= responses
        if window and (each.step != window[-1].step if each.step is not None else is_full):
            yield window
            window = []
        window.append(each)
    if window:
        yield window


def _azure(text: str) -> Iterator[Group]:
    for number, row in enumerate(csv.DictReader(text.splitlines())):
        yield Group(str(number), int(row["ContextTokens"]), (max(1, int(row["GeneratedTokens"])),))


def _scheduling(rows: list[Mapping[str, Any]]) -> Iterator[Group]:
    for row in rows:
        lengths = (min(SCHEDULING_TOKENS_MAX, max(1, row[name])) for name in TEMPERATURES)
        yield Group(row["id"], 0, tuple(lengths), None, SCHEDULING_TOKENS_MAX)
