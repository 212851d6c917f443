"""One session: a tree of calls, each of which goes on from the tokens of the one before it.

Invariants (`check`):
- A call goes on from one that was answered, and its prompt is that one's prompt, what that made, and its own tokens.
- Each call that was answered is trained in exactly one trajectory.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tensorhub_gateway.sessions.messages import Json, Reply, digest_of, meaning_of

CALLS_MAX: Final = 1024
"""Limit of the calls of one session."""
SESSION_TOKENS_MAX: Final = 1_048_576
"""Limit of the tokens of one session, those that its calls have in common counted once."""

TurnState = Literal["open", "made", "void"]
"""`void`: it was cancelled or failed, or its client went away before it was answered."""


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """What a call of the chat says; digests are of what each message means."""

    messages: tuple[Json, ...]
    tools: tuple[Json, ...] | None
    digests: tuple[bytes, ...]
    tools_digest: bytes

    @classmethod
    def of(cls, messages: tuple[Json, ...], tools: tuple[Json, ...] | None) -> "ChatAsked":
        """Return what these checked messages and tools say."""
        return cls(messages, tools, tuple(meaning_of(each) for each in messages), digest_of(tools))


@dataclass(frozen=True, slots=True)
class TextAsked:
    """What a call for a completion says: text, or token ids."""

    text: str | None = None
    token_ids: "array[int] | None" = None


Asked = ChatAsked | TextAsked


@dataclass(slots=True, eq=False)
class Turn:
    """One call. Token ids are int32."""

    number: int
    before: "Turn | None"
    """The call that it goes on from."""
    forked: str | None
    """Why it goes on from none, though there were some; None: it does, or is the first."""
    inserted: "array[int]"
    """Its tokens behind those of the call before: what users, tools and the template say."""
    inserted_text: str = ""
    """The text of these."""
    written: str = ""
    """What the template wrote there: `inserted_text`, and before it the end of the answer before."""
    digests: tuple[bytes, ...] | None = None
    """Of the messages of a chat."""
    tools_digest: bytes = b""
    is_text: bool = False
    """Whether it was asked for with text."""
    state: TurnState = "open"
    made: "array[int]" = field(default_factory=lambda: array("i"))
    """With the stop token."""
    text: str = ""
    """What was made, without the stop token, as the client got it."""
    stop_text: str = ""
    """The text of the stop token; empty: none ended it."""
    reply: Reply | None = None
    reply_digest: bytes = b""

    def path(self) -> "list[Turn]":
        """Return the calls from the first one to this."""
        found, each = [self], self.before
        while each is not None:
            found.append(each)
            each = each.before
        return found[::-1]

    def prompt(self) -> "array[int]":
        """Return all tokens before what this call makes."""
        found = array("i")
        for each in self.path():
            found += each.inserted
            if each is not self:
                found += each.made
        return found

    def text_so_far(self) -> str:
        """Return all text up to its end, without the stop token."""
        return "".join(
            each.inserted_text + each.text + ("" if each is self else each.stop_text) for each in self.path()
        )


@dataclass(frozen=True, slots=True)
class Branch:
    """The calls of a trajectory, each with whether its tokens are trained in it."""

    turns: tuple[tuple[Turn, bool], ...]


@dataclass(slots=True, eq=False)
class Session:
    """One session. Times are of its user's clock, in seconds."""

    id: str
    touched_at: float
    """When a call or a reward came last, or a call ended."""
    metadata: Any = None
    turns: list[Turn] = field(default_factory=list)
    tokens: int = 0
    """How many it has, those that calls have in common counted once."""
    reward: float | None = None
    is_final: bool = False
    """Whether the reward was the last one: no further call is taken."""
    open: int = 0
    """Calls that have not ended, from the moment on in which they came."""

    def find(self, asked: Asked) -> Turn | None:
        """Return the call that this one may go on from: the longest, and of these the latest."""
        found, length = None, -1
        for each in self.turns:
            said = _said(each, asked) if each.state == "made" else None
            if said is not None and said >= length:
                found, length = each, said
        return found

    def begin(
        self, asked: Asked, before: Turn | None, forked: str | None, inserted: "array[int]", texts: tuple[str, str]
    ) -> Turn:
        """Take a call. `texts`: that of `inserted`, and what the template wrote there."""
        turn = Turn(len(self.turns), before, forked, inserted, *texts)
        if isinstance(asked, ChatAsked):
            turn.digests, turn.tools_digest = asked.digests, asked.tools_digest
        else:
            turn.is_text = asked.text is not None
        self.turns.append(turn)
        self.tokens += len(inserted)
        return turn

    def make(self, turn: Turn, made: "array[int]", text: str, stop_text: str, reply: Reply) -> None:
        """Note what a call has made, and that its client gets it."""
        turn.state, turn.made, turn.text, turn.stop_text = "made", made, text, stop_text
        turn.reply, turn.reply_digest = reply, reply.meaning()
        self.tokens += len(made)

    @staticmethod
    def void(turn: Turn) -> None:
        """Note that a call has ended without an answer that a client got: it is in no trajectory."""
        turn.state = "void"

    def branches(self) -> list[Branch]:
        """Return the trajectories: one for each call that no other goes on from."""
        followed = {each.before for each in self.turns if each.state == "made"}
        trained: set[Turn] = set()
        found = []
        for leaf in self.turns:
            if leaf.state != "made" or leaf in followed:
                continue
            path = leaf.path()
            found.append(Branch(tuple((each, each not in trained) for each in path)))
            trained.update(path)
        return found

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        trained = [turn for branch in self.branches() for turn, is_trained in branch.turns if is_trained]
        assert len(trained) == len(set(trained))
        assert set(trained) == {each for each in self.turns if each.state == "made"}
        for turn in self.turns:
            assert turn.before is None or (turn.before.state == "made" and turn.forked is None)


def _said(turn: Turn, asked: Asked) -> int | None:
    """Return how much of what is asked was said up to the end of a call; None: that is not its beginning."""
    if isinstance(asked, ChatAsked):
        if turn.digests is None or turn.tools_digest != asked.tools_digest:
            return None
        count = len(turn.digests)
        behind = asked.digests[count : count + 1]
        is_so = len(asked.digests) > count + 1 and behind == (turn.reply_digest,)
        return count if is_so and asked.digests[:count] == turn.digests else None
    if turn.digests is not None or turn.is_text != (asked.text is not None):
        return None
    if asked.text is not None:
        text = turn.text_so_far()
        return len(text) if asked.text.startswith(text) else None
    whole = turn.prompt() + turn.made
    return len(whole) if asked.token_ids is not None and asked.token_ids[: len(whole)] == whole else None
