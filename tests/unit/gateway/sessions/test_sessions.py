"""Trees of calls: whatever comes in whichever order, each token that was made is trained once, where it stood."""

from array import array
from collections.abc import Sequence
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_gateway.sessions.extension import Extension, Fork, extended_chat
from tensorhub_gateway.sessions.messages import Json, Reply, for_template, message_of
from tensorhub_gateway.sessions.session import ChatAsked, Session, TextAsked, Turn
from tensorhub_gateway.sessions.tools import HermesParser

END: Final = 1
"""The stop token; others are characters."""
BEHIND: Final = 1000
"""A token that is written as two characters, so that its text tokenised again is another one."""


def render(messages: Sequence[Json], tools: Sequence[Json] | None) -> str:
    said = "".join(f"[{each['role']}]{each['content']}\x01" for each in messages)
    return f"{said}[assistant]"


def ids(text: str) -> "array[int]":
    return array("i", [ord(each) for each in text])


def text_of(tokens: "array[int]") -> str:
    return "".join("xy" if each == BEHIND else chr(each) for each in tokens)


class Chat:
    """A session whose model says what it is told to."""

    def __init__(self) -> None:
        self.session = Session("s", 0.0)
        self.parser = HermesParser()

    def begin(self, messages: Sequence[Json], render: Any = render) -> Turn:
        asked = ChatAsked.of(tuple(messages), None)
        before = self.session.find(asked)
        found = (
            None if before is None else extended_chat(before, asked, render, lambda text: self.parser.parse(text, 0))
        )
        if isinstance(found, Extension):
            return self.session.begin(asked, before, None, ids(found.inserted), (found.inserted, found.written))
        text = render([for_template(each) for each in messages], None)
        return self.session.begin(asked, None, found.why if isinstance(found, Fork) else None, ids(text), (text, text))

    def make(self, turn: Turn, made: Sequence[int]) -> Reply:
        tokens = array("i", made)
        stops = bool(tokens) and tokens[-1] == END
        text = text_of(tokens[:-1] if stops else tokens)
        reply = self.parser.parse(text, turn.number)
        self.session.make(turn, tokens, text, chr(END) if stops else "", reply)
        return reply


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def test_a_call_goes_on_from_the_tokens_that_were_made_and_not_from_their_text() -> None:
    chat = Chat()
    first = chat.begin([user("hi")])
    reply = chat.make(first, [ord("a"), BEHIND, END])
    second = chat.begin([user("hi"), message_of(reply), user("more")])
    assert second.before is first
    assert second.prompt() == first.prompt() + array("i", [ord("a"), BEHIND, END]) + ids("[user]more\x01[assistant]")


def test_an_answer_that_was_cut_off_is_ended_by_the_template() -> None:
    chat = Chat()
    first = chat.begin([user("hi")])
    reply = chat.make(first, [ord("a"), ord("b")])
    second = chat.begin([user("hi"), message_of(reply), user("more")])
    assert second.inserted == ids("\x01[user]more\x01[assistant]")


def test_calls_of_one_beginning_are_siblings_and_what_they_share_is_trained_once() -> None:
    chat = Chat()
    first = chat.begin([user("hi")])
    reply = chat.make(first, [ord("a"), END])
    both = [chat.begin([user("hi"), message_of(reply), user("more")]) for _ in range(2)]
    for number, each in enumerate(both):
        chat.make(each, [ord("b") + number, END])
    assert [each.before for each in both] == [first, first]
    branches = chat.session.branches()
    assert [[(turn.number, trained) for turn, trained in each.turns] for each in branches] == [
        [(0, True), (1, True)],
        [(0, False), (2, True)],
    ]


def test_history_that_the_client_changed_forks() -> None:
    chat = Chat()
    chat.make(chat.begin([user("hi")]), [ord("a"), END])
    turn = chat.begin([user("hi"), {"role": "assistant", "content": "other"}, user("more")])
    assert turn.before is None
    assert turn.prompt() == ids("[user]hi\x01[assistant]other\x01[user]more\x01[assistant]")


def test_a_template_that_drops_what_was_thought_forks_and_says_so() -> None:
    def dropping(messages: Sequence[Json], tools: Sequence[Json] | None) -> str:
        kept = [
            {**each, "content": each["content"].rpartition("</think>")[2]} if each["role"] == "assistant" else each
            for each in messages
        ]
        return render(kept, tools)

    chat = Chat()
    reply = chat.make(chat.begin([user("hi")], dropping), [*map(ord, "hm</think>a"), END])
    turn = chat.begin([user("hi"), message_of(reply), user("more")], dropping)
    assert turn.before is None
    assert turn.forked is not None
    assert "an earlier answer" in turn.forked
    assert turn.prompt() == ids("[user]hi\x01[assistant]a\x01[user]more\x01[assistant]")


def test_a_template_that_writes_earlier_messages_otherwise_forks() -> None:
    def counting(messages: Sequence[Json], tools: Sequence[Json] | None) -> str:
        return f"{len(messages)} messages" + render(messages, tools)

    chat = Chat()
    reply = chat.make(chat.begin([user("hi")], counting), [ord("a"), END])
    turn = chat.begin([user("hi"), message_of(reply), user("more")], counting)
    assert turn.forked is not None
    assert "earlier messages" in turn.forked


def test_a_template_that_writes_spaces_and_json_otherwise_does_not_fork() -> None:
    def stripping(messages: Sequence[Json], tools: Sequence[Json] | None) -> str:
        said = []
        for each in messages:
            calls = "".join(
                f'<tool_call>{{"name":"{call["function"]["name"]}","arguments":{{"b":2,"a":1}}}}</tool_call>'
                for call in each.get("tool_calls", ())
            )
            said.append({"role": each["role"], "content": each["content"].strip() + calls})
        return render(said, tools)

    chat = Chat()
    made = ' I look \n<tool_call>\n{"name": "look", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    reply = chat.make(chat.begin([user("hi")], stripping), [*map(ord, made), END])
    assert [each.name for each in reply.tool_calls] == ["look"]
    said = [user("hi"), message_of(reply), {"role": "tool", "content": "42", "tool_call_id": "call_0_0"}]
    turn = chat.begin(said, stripping)
    assert turn.before is chat.session.turns[0]
    assert turn.inserted == ids("[tool]42\x01[assistant]")


def test_what_says_a_mark_forks_and_is_not_taken_apart() -> None:
    chat = Chat()
    reply = chat.make(chat.begin([user("hi")]), [ord("a"), END])
    whole = len(render([user("hi"), message_of(reply), user("?" * 20)], None))
    mark = f"anSwer0iShEre{whole}oF"
    turn = chat.begin([user("hi"), message_of(reply), user(mark + "?" * (20 - len(mark)))])
    assert turn.before is None


def test_text_goes_on_from_tokens_too() -> None:
    session = Session("s", 0.0)
    first = session.begin(TextAsked(text="once "), None, None, ids("once "), ("once ", "once "))
    session.make(first, array("i", [BEHIND]), "xy", "", Reply("xy"))
    assert session.find(TextAsked(text="once xy then")) is first
    assert session.find(TextAsked(text="once x")) is None
    assert session.find(TextAsked(token_ids=ids("once xy then"))) is None


ACTIONS: Final = st.lists(
    st.tuples(
        st.sampled_from(["call", "extend", "again", "change", "end", "void", "cut"]),
        st.integers(0, 63),
        st.lists(st.sampled_from([ord("a"), ord(" "), ord("["), BEHIND, ord("<")]), max_size=4),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_whatever_comes_each_token_is_trained_once_where_it_stood(actions: list[tuple[str, int, list[int]]]) -> None:
    """`call`: others at once, of a new chat. `extend`: from any answered call. `change`: with another answer."""
    chat = Chat()
    messages: dict[Turn, list[Json]] = {}
    made: dict[Turn, list[int]] = {}
    for what, number, tokens in actions:
        open_ = [each for each in chat.session.turns if each.state == "open"]
        done = [each for each in chat.session.turns if each.state == "made"]
        if what in {"end", "cut", "void"} and open_:
            turn = open_[number % len(open_)]
            if what == "void":
                chat.session.void(turn)
                continue
            made[turn] = [*tokens, END] if what == "end" else [*tokens, ord("z")]
            chat.make(turn, made[turn])
        elif what in {"extend", "change"} and done:
            turn = done[number % len(done)]
            assert turn.reply is not None
            reply = message_of(turn.reply) if what == "extend" else {"role": "assistant", "content": "changed"}
            said = [*messages[turn], reply, user(f"m{number % 3}")]
            new = chat.begin(said)
            messages[new] = said
            if what == "extend":
                # Of several calls that said the same, the latest is gone on from.
                assert new.before is not None
                assert new.before.text.strip() == turn.text.strip()
        elif what == "again" and chat.session.turns:
            said = messages[chat.session.turns[number % len(chat.session.turns)]]
            messages[chat.begin(said)] = said
        else:
            said = [user(f"u{number % 3}")]
            messages[chat.begin(said)] = said
        chat.session.check()
    trained = list[Turn]()
    for branch in chat.session.branches():
        whole = branch.turns[-1][0].prompt() + branch.turns[-1][0].made
        for turn, is_trained in branch.turns:
            at = len(turn.prompt())
            assert whole[:at] == turn.prompt()
            assert whole[at : at + len(turn.made)].tolist() == made[turn]
            trained += [turn] if is_trained else []
    assert sorted(each.number for each in trained) == sorted(each.number for each in made)
