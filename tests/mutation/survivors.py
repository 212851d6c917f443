"""Why each surviving mutant is harmless: what survivors.toml says, held against what has survived."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.mutation.results import Outcome, Survivor


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why mutants of one line of a function are harmless."""

    where: str
    line: str
    mutants: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Survivors without a reason, and reasons without a survivor."""

    unexplained: list[Survivor]
    stale: list[Explanation]


def explanations(text: str) -> list[Explanation]:
    return [
        Explanation(where=each["where"], line=each["line"], mutants=tuple(each["mutants"]), why=each["why"])
        for each in tomllib.loads(text).get("harmless", ())
    ]


def judged(tested: Mapping[str, Outcome], modules: Iterable[str], known: Iterable[Explanation]) -> Verdict:
    """Hold what survived against what is explained; of `modules` that were not tested no explanation is stale."""
    untested = tuple(f"{module}." for module in modules if module not in tested)
    reasons = {Survivor(each.where, each.line, mutant): each for each in known for mutant in each.mutants}
    alive = [survivor for outcome in tested.values() for survivor in outcome.survivors]
    unused = [each for key, each in reasons.items() if key not in alive and not key.where.startswith(untested)]
    return Verdict([each for each in alive if each not in reasons], list(dict.fromkeys(unused)))
