"""Which span belongs below which, also where some were lost on their way: pure.

Spans come from many processes, so some may be missing, and nothing guarantees that what came is a tree. Always true:
every span that is given is in the forest exactly once.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tensorhub_common.protocol.spans import TRANSFER, FinishedSpan

_Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Node:
    """A span and what it consists of, in the order of time."""

    span: FinishedSpan
    children: list["Node"] = field(default_factory=list)


def forest(spans: Sequence[FinishedSpan]) -> list[Node]:
    """Return the trees; a span whose parent is not among them is the root of its own."""
    nodes = {_place(span): Node(span) for span in sorted(spans, key=_order)}
    below: defaultdict[_Place | None, list[Node]] = defaultdict(list)
    for node in nodes.values():
        parent = None if node.span.parent is None else (node.span.trace, node.span.parent)
        below[parent if parent in nodes else None].append(node)
    roots = below.pop(None, [])
    reached: set[_Place] = set()
    _reach(roots, below, reached)
    for place, node in nodes.items():
        if place not in reached:
            # Spans that name each other as parents: nonsense of somebody's, but not to be hidden.
            roots.append(node)
            _reach([node], below, reached)
    return sorted(roots, key=lambda node: _order(node.span))


def _reach(start: list[Node], below: dict[_Place | None, list[Node]], reached: set[_Place]) -> None:
    """Hang the children below their parents, from these nodes on."""
    pending = list(start)
    reached.update(_place(node.span) for node in start)
    while pending:
        node = pending.pop()
        for child in below.get(_place(node.span), ()):
            if _place(child.span) not in reached:
                reached.add(_place(child.span))
                node.children.append(child)
                pending.append(child)


def rows(roots: Sequence[Node]) -> Iterator[tuple[int, FinishedSpan]]:
    """Yield (depth, span) in the order in which they are drawn."""
    pending = [(0, root) for root in reversed(roots)]
    while pending:
        depth, node = pending.pop()
        yield depth, node.span
        pending.extend((depth + 1, child) for child in reversed(node.children))


def without_other_transfers(roots: Sequence[Node], wanted: Collection[str]) -> list[Node]:
    """Leave out the transfers, with all below them, that are not of these ids: other shards of the same version.

    One that has a wanted one below it is kept: it belongs to the shard that joined the round last.
    """
    led = _leading_to(roots, wanted)

    def is_kept(node: Node) -> bool:
        return node.span.name != TRANSFER or _place(node.span) in led

    kept = [root for root in roots if is_kept(root)]
    pending = list(kept)
    while pending:
        node = pending.pop()
        node.children[:] = [child for child in node.children if is_kept(child)]
        pending.extend(node.children)
    return kept


def _leading_to(roots: Sequence[Node], wanted: Collection[str]) -> set[_Place]:
    """Return the places of the wanted spans, and of all their ancestors."""
    above: dict[_Place, _Place] = {}
    led: set[_Place] = set()
    for _, span in rows(roots):
        if span.parent is not None:
            above[_place(span)] = (span.trace, span.parent)
        if span.span in wanted:
            place: _Place | None = _place(span)
            while place is not None and place not in led:
                led.add(place)
                place = above.get(place)
    return led


def _place(span: FinishedSpan) -> _Place:
    return span.trace, span.span


def _order(span: FinishedSpan) -> tuple[int, int, str]:
    return span.start_ns, -span.end_ns, span.span
