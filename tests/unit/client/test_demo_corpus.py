"""The demo's text: the same everywhere, long enough, and simple enough to be learnt in seconds."""

import zlib

from tensorhub.demo.corpus import REFRAIN, verses


def test_text_follows_from_the_seed() -> None:
    assert verses(1, 5000) == verses(1, 5000)
    assert verses(1, 5000) != verses(2, 5000)
    assert verses(1, 9000).startswith(verses(1, 5000))


def test_text_is_whole_verses_of_the_length_asked_for() -> None:
    text = verses(0, 20_000)
    assert len(text) >= 20_000
    assert text.isascii()
    assert text.endswith(f"{REFRAIN}\n")
    assert len(zlib.compress(text.encode())) < len(text) / 5
