"""The reasons of a plan or a refusal in words, for the trace of a transfer and for operators. Pure."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from tensorhub_common.protocol.ranges import Ranges, total_count
from tensorhub_planner.catalog_view.holders import ABSENT_MAX, Holder, HolderSet, named
from tensorhub_planner.planning.selection import Assignment, Selection, SourceOffer
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import DISTANCE_WORDS

CHOICES_TOLD_MAX: Final = 4
"""Limit of the choices that a plan explains; only holders of parts make more than one."""

WORDS_KEPT_MAX: Final = 4096
"""Limit of the numbers of bytes whose words are kept: plans of one replica have the same few."""


def why_share(choice: Selection, part: Assignment) -> str:
    """Say why this source gives its pieces."""
    offer = part.offer
    filling = f"; half-filled, {counted(offer.depth, 'hop')} from a ready holder" if offer.depth else ""
    return (
        f"{DISTANCE_WORDS[choice.distance]}; number {part.place} of {choice.sources} there by load "
        f"({counted(offer.readers, 'reader')}, {_bytes(offer.assigned)} assigned){_measured(offer)}{filling}"
    )


def _measured(offer: SourceOffer) -> str:
    rate = offer.measured
    if rate is None:
        return ""
    return f"; measured {_bytes(rate.bps)}/s in {counted(rate.samples, 'sample')}, the last {rate.age_s:.3g} s ago"


def why_mapped(offer: SourceOffer) -> str:
    """Say why this holder's memory is mapped."""
    return f"mapped from {DISTANCE_WORDS[offer.distance]} ({counted(offer.readers, 'reader')}): nothing is copied"


def why_plan(
    choices: Sequence[Selection], wanted: Ranges, sizes: PieceSizes, left_out: Sequence[str], crossers: int
) -> str:
    """Say how many sources were taken, from where, and what the model says of it; `crossers` share out what crosses."""
    if not wanted:
        return "there is nothing to read"
    told = [f"{counted(total_count(wanted), 'piece')} ({_bytes(sizes.of(wanted))})"]
    told += [_choice(choice) for choice in choices[:CHOICES_TOLD_MAX]]
    if len(choices) > CHOICES_TOLD_MAX:
        told.append(f"and {len(choices) - CHOICES_TOLD_MAX} more groups of pieces")
    if crossers:
        told.append(f"each of {crossers} in this site brings a part over, and they exchange the rest")
    if left_out:
        told.append(f"left out: {_list(left_out)}")
    return "; ".join(told)


def why_refusal(what: str, left_out: Sequence[str], strangers: Sequence[Holder], holders: HolderSet) -> str:
    """Say who can't serve `what` and why, and what to do."""
    reasons = absentees(left_out, strangers, holders)
    return f"no source is left for {what} ({reasons}): wait for another holder, and ask again"


def absentees(left_out: Sequence[str], strangers: Sequence[Holder], holders: HolderSet) -> str:
    """Name who can't serve, and say why."""
    others = [f"{named(holder.source)} has another layout" for holder in strangers]
    return _list([*left_out, *others, *holders.absent], holders.absent_more) or "no other replica has registered"


def _choice(choice: Selection) -> str:
    used = f"{len(choice.parts)} of {counted(choice.sources, 'source')} on {DISTANCE_WORDS[choice.distance]}"
    if choice.is_behind:
        used += ", after farther ones that were measured to be far faster"
    ms, alone_ms = choice.seconds * 1e3, choice.seconds_alone * 1e3
    if choice.sources == 1:
        return used
    if not choice.stripes_pay:
        return f"{used}, because the reader's own copying or the link is the bound there: more would gain nothing"
    if len(choice.parts) == 1:
        return f"{used}, because more would hardly be faster than {ms:.3g} ms by the model"
    return f"{used}, which by the model takes {ms:.3g} ms instead of {alone_ms:.3g} from one"


def _list(words: Sequence[str], more: int = 0) -> str:
    more += max(0, len(words) - ABSENT_MAX)
    return ", ".join(words[:ABSENT_MAX]) + (f" and {more} more" if more else "")


def counted(number: int, noun: str) -> str:
    """Return "1 piece" or "2 pieces"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@lru_cache(maxsize=WORDS_KEPT_MAX)
def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:  # noqa: PLR2004 (the units' own factor)
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
