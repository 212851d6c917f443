"""Responses as lines of a file: all that made them but the weights, so that they can be made again. I/O.

Each line is a JSON object and stands for itself. Log-probabilities are written so that each float32 is read again bit
for bit; one that is no finite number is null.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from tensorhub._rollouts.prompts import SEED_BITS, TOKEN_ID_MAX, Sampling
from tensorhub._rollouts.responses import FinishReason, Response, TokenRun
from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.decoding import MALFORMED

FORMAT: Final = 1
RECORDS_MAX: Final = 65_536
"""Limit of the responses that are read of one file."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One response. Its fields are those of `Response`; `metadata` stays with the trainer."""

    format: int = FORMAT
    job: str
    model: str
    group: str
    index: int
    finish_reason: FinishReason
    error: str | None
    sampling: Sampling
    """As its prompt was submitted with: its `seed` is not the response's own."""
    seed: Annotated[int, msgspec.Meta(ge=0)]
    runs: tuple[TokenRun, ...]
    prompt_ids: tuple[TokenId, ...]
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[float | None, ...]


_decoder: Final = msgspec.json.Decoder(ResponseRecord)


def record_of(job: str, model: str, response: Response) -> ResponseRecord:
    """Return what is to be kept of a response."""
    return ResponseRecord(
        job=job,
        model=model,
        group=response.group,
        index=response.index,
        finish_reason=response.finish_reason,
        error=response.error,
        sampling=response.sampling,
        seed=response.seed,
        runs=response.runs,
        prompt_ids=tuple(response.prompt_ids.tolist()),
        token_ids=tuple(response.token_ids.tolist()),
        logprobs=tuple(response.logprobs.tolist()),
    )


def encode(record: ResponseRecord) -> bytes:
    """Return a record as one line."""
    return msgspec.json.encode(record) + b"\n"


def decode(line: bytes) -> ResponseRecord:
    """Read one line. Raises `ValueError` where it is no response, or one that contradicts itself."""
    try:
        record = _decoder.decode(line)
        record.sampling.checked()
    except (*MALFORMED, BadPrompt) as why:
        raise ValueError(f"it is no response: {why}") from None
    if record.format != FORMAT:
        raise ValueError(f"it has format {record.format}, and this release reads {FORMAT}: use the one that wrote it")
    if record.seed >> SEED_BITS:
        raise ValueError(f"its seed {record.seed} does not fit {SEED_BITS} bits")
    count = len(record.token_ids)
    if len(record.logprobs) != count or not record.prompt_ids:
        raise ValueError(
            f"it has {len(record.prompt_ids)} tokens of a prompt, {count} of a response, and {len(record.logprobs)} "
            "log-probabilities: it needs a prompt, and a log-probability for each token"
        )
    if not _covers(record.runs, count):
        raise ValueError(f"its runs are not one behind the other from token 0 to token {count}")
    return record


def _covers(runs: tuple[TokenRun, ...], count: int) -> bool:
    ends = [0, *(each.end for each in runs)]
    return (
        ends[-1] == count
        and all(start < end for start, end in pairwise(ends))
        and all(run.start == end for run, end in zip(runs, ends, strict=False))
    )


def append(path: Path, records: Iterable[ResponseRecord]) -> None:
    """Write records behind what a file has, which is made if there is none. Raises `OSError`."""
    is_torn = _is_torn(path)
    with path.open("ab") as file:
        if is_torn:
            # A line that was broken off is one by itself: it would spoil the next record too.
            file.write(b"\n")
        file.writelines(map(encode, records))
        file.flush()
        os.fsync(file.fileno())


def _is_torn(path: Path) -> bool:
    """Tell whether a file ends within a line, since who wrote it was killed."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read(path: Path) -> Iterator[ResponseRecord]:
    """Yield the records of a file. Raises `OSError`, and `ValueError` that names the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number > RECORDS_MAX:
                raise ValueError(f"it has more than {RECORDS_MAX} lines: split it")
            if not line.strip():
                continue
            try:
                yield decode(line)
            except ValueError as why:
                raise ValueError(f"line {number}: {why}") from None


def ids_bytes(ids: tuple[int, ...]) -> bytes:
    """Return token ids as they travel."""
    return np.array(ids, "<i4").tobytes()
