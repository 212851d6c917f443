"""A leader's term in one log: above all terms there, and valid only once the log has taken it."""

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.commands import Lead, Sender
from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_common.protocol.subjects import REGISTRY
from tensorhub_registry.core.term_fence import TermFence

JOB = "run-7"


def say(catalog: Catalog, command: Lead) -> AnyEvent:
    return apply(catalog, catalog.seq + 1, 1.0, command)[0]  # type: ignore[return-value]


def test_it_counts_once_it_is_folded() -> None:
    catalog, claim = Catalog(JOB, seq=1), TermFence("registry-0")
    command = claim.ask(7, catalog)
    assert (command, claim.term) == (Lead(by=Sender(REGISTRY, 7, 0), registry="registry-0", term=7), None)
    assert claim.ask(7, catalog) == command, "the same again until it is folded"
    claim.see(say(catalog, command))
    assert claim.term == catalog.term == 7


def test_a_term_is_above_what_the_log_has_heard() -> None:
    """The store of the leases was lost, and this is its first term."""
    catalog, claim = Catalog(JOB, seq=9, term=40), TermFence("registry-0")
    claim.see(say(catalog, claim.ask(1, catalog)))
    assert claim.term == catalog.term == 41


def test_who_is_overtaken_claims_again() -> None:
    """Both began after the store was lost and took the same number: the log's order decides, and the other goes on."""
    catalog, one, two = Catalog(JOB, seq=9, term=40), TermFence("registry-0"), TermFence("registry-1")
    first, second = one.ask(1, catalog), two.ask(2, catalog)
    assert first.term == second.term == 41
    for said in (first, second):
        event = say(catalog, said)
        one.see(event)
        two.see(event)
    assert (one.term, two.term) == (41, None)
    event = say(catalog, two.ask(2, catalog))
    one.see(event)
    two.see(event)
    assert (one.term, two.term) == (None, 42)


def test_in_a_log_without_a_word_the_leases_term_is_enough() -> None:
    claim = TermFence("registry-0")
    claim.begin(3)
    assert claim.term == 3
    claim.drop()
    assert claim.term is None


def test_a_raise_takes_another_term() -> None:
    """What was said under this term may stand in the log already, and a repeat of it would be no news."""
    catalog, claim = Catalog(JOB, seq=9, term=40), TermFence("registry-0")
    first = claim.ask(1, catalog)
    claim.level = NEWEST_LEVEL
    raising = claim.ask(1, catalog)
    assert (raising.level, raising.term) == (NEWEST_LEVEL, first.term + 1)
    assert claim.ask(1, catalog) == raising
    claim.see(say(catalog, first))
    assert claim.is_due(catalog)
    claim.see(say(catalog, raising))
    assert (claim.term, catalog.level, claim.is_due(catalog)) == (raising.term, NEWEST_LEVEL, False)
