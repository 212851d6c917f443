"""A model's tokenizer and its chat template, as a gateway uses them.

Not safe for threads: a tokenizer is used by one at a time.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tensorhub_common.errors import BadCommand
from tensorhub_gateway.sessions.extension import Unrendered
from tensorhub_gateway.sessions.messages import Json

UNFINISHED: Final = "\ufffd"
"""What a part of a character's bytes is written as."""
CONTEXT: Final = 4
"""So many tokens before new ones are decoded with them."""
WINDOW_MAX: Final = 64
"""Text that makes no character in so many tokens is said as it is."""


class ChatTokenizer:
    """The tokenizer of a model."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 (transformers' classes are followed nowhere)
        """Take a tokenizer, or the directory of one. Raises `BadCommand` for what can't be one."""
        if isinstance(tokenizer, str | Path):
            tokenizer = _loaded(Path(tokenizer))
        missing = [each for each in ("apply_chat_template", "decode", "eos_token_id") if not hasattr(tokenizer, each)]
        if missing:
            raise BadCommand(
                f"tokenizer={type(tokenizer).__name__} can't be used: give a directory with a tokenizer, or one of "
                "transformers"
            )
        self._tokenizer = tokenizer
        ends = tokenizer.eos_token_id
        self.end_ids: tuple[int, ...] = () if ends is None else (int(ends),)
        """What ends an answer where nothing else is said."""

    def render(self, messages: Sequence[Json], tools: Sequence[Json] | None) -> str:
        """Return a chat as text, up to where the model answers. Raises `Unrendered`."""
        if not self._tokenizer.chat_template:
            raise Unrendered("the tokenizer has no chat template: use /v1/completions, or give the model one")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=None if tools is None else list(tools), tokenize=False, add_generation_prompt=True
            )
        # A template is a program: it raises what it likes.
        except Exception as why:  # noqa: BLE001
            raise Unrendered(f"the chat template does not take these messages: {why}") from None
        return str(text)

    def ids(self, text: str) -> "array[int]":
        """Return the token ids of text, with those that are written in it and no other special ones."""
        return array("i", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special ones written out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class TextStream:
    """Text of tokens as they come. What it says ends between two characters, but for the last of it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window = array("i")
        """The latest tokens: what a token says may depend on those before."""
        self._said = 0
        """How much of the text of these was said."""

    def take(self, ids: Sequence[int]) -> str:
        """Take more tokens, and return the text that is complete."""
        self._window.extend(ids)
        text = self._tokenizer.text(self._window)
        end = len(text) if len(self._window) > WINDOW_MAX else len(text.rstrip(UNFINISHED))
        said = text[self._said : end]
        if end == len(text):
            self._window = self._window[-CONTEXT:]
            self._said = len(self._tokenizer.text(self._window))
        else:
            self._said = max(self._said, end)
        return said

    def rest(self) -> str:
        """Return the text of what is left."""
        text = self._tokenizer.text(self._window)[self._said :]
        self._window, self._said = array("i"), 0
        return text


def _loaded(directory: Path) -> Any:  # noqa: ANN401 (as above)
    """Load a tokenizer from a directory's own files; nothing is fetched."""
    if not directory.is_dir():
        raise BadCommand(f"tokenizer={str(directory)!r} is no directory: name the one with tokenizer.json")
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 (it takes seconds)
    except ImportError:
        raise BadCommand("a tokenizer needs transformers: pip install 'tensorhub[gateway]'") from None
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as why:
        raise BadCommand(f"the tokenizer in {str(directory)!r} can't be read: {str(why)[:300]}") from None
