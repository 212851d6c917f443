"""Text of tokens as they come, and a chat template that fails."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.chat_models import END, save_chat_model, tiny_tokenizer

from tensorhub_common.errors import BadCommand
from tensorhub_gateway.chat.tokenizer import ChatTokenizer, TextStream
from tensorhub_gateway.sessions.extension import Unrendered

TOKENIZER = ChatTokenizer(tiny_tokenizer())


@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=20))
def test_text_comes_whole_and_in_whole_characters(text: str, cuts: list[int]) -> None:
    ids, said, at, parts = TOKENIZER.ids(text), TextStream(TOKENIZER), 0, list[str]()
    for count in [*cuts, len(ids)]:
        parts.append(said.take(ids[at : at + count]))
        at += count
    if "\ufffd" not in text:
        assert not any("\ufffd" in each for each in parts)
    assert "".join(parts) + said.rest() == TOKENIZER.text(ids)


def test_bytes_that_make_no_character_are_said_in_the_end() -> None:
    said = TextStream(TOKENIZER)
    broken = TOKENIZER.ids("é")[:1]
    assert said.take(broken) == ""
    assert said.rest() == "\ufffd"
    assert "\ufffd" in said.take(broken * 100)


def test_a_tokenizer_comes_from_a_directory_and_knows_what_ends_an_answer(tmp_path: Path) -> None:
    save_chat_model(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    assert [tokenizer.text([each]) for each in tokenizer.end_ids] == [END]
    assert tokenizer.render([{"role": "user", "content": "hi"}], None).endswith("assistant\n")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    for given_ in (tmp_path / "none", tmp_path, 5):
        with pytest.raises(BadCommand, match="tokenizer"):
            ChatTokenizer(given_)


@pytest.mark.parametrize("template", ["", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{% if %}"])
def test_a_template_that_fails_is_told(template: str) -> None:
    with pytest.raises(Unrendered, match="template"):
        ChatTokenizer(tiny_tokenizer(template)).render([{"role": "user", "content": "hi"}], None)
