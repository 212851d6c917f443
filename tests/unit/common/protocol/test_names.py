"""Names that may stand in a subject, and everything that may not."""

import pytest

from tensorhub_common.errors import InvalidName
from tensorhub_common.protocol.subjects import NAME_CHARS_MAX, check_name, is_name

GOOD = ["a", "A-9_z", "7", "-", "x" * NAME_CHARS_MAX]
BAD: list[object] = [
    "",
    "x" * (NAME_CHARS_MAX + 1),
    "a.b",
    "*",
    ">",
    "a b",
    "a\n",
    "\n",
    "ü",
    "a\x00",
    "/",
    "$SYS",
    None,
    7,
    b"a",
    ["a"],
]


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name: str) -> None:
    assert is_name(name)
    assert check_name("model", name) == name


@pytest.mark.parametrize("name", BAD)
def test_anything_else_is_refused_before_it_reaches_nats(name: object) -> None:
    assert not is_name(name)
    with pytest.raises(InvalidName, match=r"^model name .* can't be used: take 1 to 64"):
        check_name("model", name)


@pytest.mark.parametrize("name", ["_", "_hub", "_registry"])
def test_names_of_the_hub_may_stand_in_a_subject_and_users_may_not_give_them(name: str) -> None:
    assert is_name(name)
    with pytest.raises(InvalidName, match="kept for the hub"):
        check_name("replica", name)


def test_the_complaint_repeats_only_the_beginning_of_what_was_given() -> None:
    with pytest.raises(InvalidName) as told:
        check_name("model", "x" * 100_000)
    assert len(str(told.value)) < 200
