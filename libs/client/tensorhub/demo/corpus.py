"""The text that the demo's model learns: verses, made by a small grammar of our own.

A demo must show a loss that falls within half a minute on two cores, without a download. So the text has few words,
much order and a refrain: a model sees within some dozens of steps that there are letters, then words, then lines.

Always true: the same seed makes the same text on every machine; all of it is ASCII.
"""

from random import Random
from typing import Final

BIRDS: Final = ("heron", "raven", "swallow", "plover", "kestrel", "curlew")
PLACES: Final = ("river", "harbour", "orchard", "valley", "island", "meadow")
COLOURS: Final = ("silver", "golden", "crimson", "amber", "silent", "hollow")
DEEDS: Final = ("wanders", "lingers", "gathers", "answers", "shelters", "remembers")
HOURS: Final = ("morning", "evening", "midnight", "winter", "autumn", "harvest")
REFRAIN: Final = "and the river runs to the sea again,\nand the river remembers the rain.\n"


def verses(seed: int, characters: int) -> str:
    """Return at least so many characters of verse, whole verses only."""
    chance = Random(seed)  # noqa: S311 (the text is for reading, not for secrets)
    made: list[str] = []
    length = 0
    while length < characters:
        made.append(_verse(chance))
        length += len(made[-1])
    return "".join(made)


def _verse(chance: Random) -> str:
    bird, place, colour = chance.choice(BIRDS), chance.choice(PLACES), chance.choice(COLOURS)
    return (
        f"the {colour} {bird} {chance.choice(DEEDS)} over the {place},\n"
        f"the {bird} {chance.choice(DEEDS)} in the {chance.choice(HOURS)} rain,\n"
        f"{REFRAIN}\n"
    )
