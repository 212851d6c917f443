"""Whether a lease has held until after the last byte, as its reader asks it over the connection.

Always true: each question is answered once; a source that is gone, or silent for too long, has said no.
"""

from typing import TYPE_CHECKING, Final

from tensorhub_agent.core.effects import Confirmed

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.transfers.source_session import Link

CONFIRM_S: Final = 2.0


class Confirming:
    """The questions over one connection."""

    def __init__(self, link: "Link") -> None:
        """Begin with none."""
        self._link = link
        self._questions = 0

    def ask(self) -> None:
        """Ask the source."""
        link = self._link
        self._questions += 1
        question = self._questions
        link.at_reader(CONFIRM_S, lambda: self._answered(question, holds=False))
        if not link.source_lives:
            link.at_reader(link.clock.lag(), lambda: self._answered(question, holds=False))
        elif not link.is_cut:
            link.clock.after(link.clock.lag(), link.source, lambda: self._arrives(question))

    def _arrives(self, question: int) -> None:
        link = self._link
        holds = link.source.core.table.holds(link.lease)
        if not link.is_cut:
            link.at_reader(link.clock.lag(), lambda: self._answered(question, holds=holds))

    def _answered(self, question: int, *, holds: bool) -> None:
        link = self._link
        if not link.closed and question == self._questions:
            self._questions += 1
            link.reader.news(Confirmed(link.key, link.number, holds))
