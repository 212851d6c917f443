"""docs/design/simulator.md has a row for each planted bug, and each was found."""

from tools.docs.simulator_page import PAGE, listed, table

from tensorhub_simulator.faultsim.mutants.planting import BUGS
from tensorhub_simulator.faultsim.runner.report import Finding


def test_the_page_lists_every_bug() -> None:
    assert listed() == list(BUGS), "look for each again: python -m tensorhub_simulator --bugs --docs"
    assert "| never |" not in PAGE.read_text(encoding="utf-8")


def test_a_row_says_what_the_bug_gets_wrong() -> None:
    assert "| `no-drain` | Unpublish neither waits for the readers nor breaks their leases. | 3 | exact version |" in (
        table([Finding("no-drain", 3, "exact version")])
    )
