"""The table of the fault matrix: one row for each victim and moment, and what never recovered stands out."""

from tests.chaos.matrix import Cell, table_of


def cell(blow: str, recovered_s: float | None, errors: dict[str, int], findings: int = 0) -> Cell:
    return Cell(
        transport="ucxx",
        victim="planner",
        blow=blow,
        moment="during",
        recovered_s=recovered_s,
        meanwhile=3,
        errors=errors,
        findings=findings,
    )


def test_both_blows_stand_in_one_row() -> None:
    killed = cell("SIGKILL", 1.25, {"RegistryUnavailable": 1})
    woken = cell("SIGSTOP", None, {"RegistryUnavailable": 2, "AgentUnavailable": 1}, findings=1)
    row = table_of([killed, woken]).splitlines()[-1]
    assert [part.strip() for part in row.strip("|").split("|")] == [
        "ucxx", "planner", "during", "1.25", "never", "3", "1 AgentUnavailable, 3 RegistryUnavailable", "1",
    ]  # fmt: skip
