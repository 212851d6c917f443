"""A scenario from the text of its file, as it is and as it is otherwise. Pure.

A mistake is told in one sentence (`ScenarioError`) before anything is simulated.
"""

import msgspec
import yaml
from msgspec.structs import replace

from tensorhub_simulator.performance import strict_yaml
from tensorhub_simulator.performance.variation import Variation, put
from tensorhub_simulator.rollout_performance.config.checks import wrongs
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.config.spot_trace import TraceError, recorded, scaled


def with_trace(scenario: Scenario, text: str) -> Scenario:
    """Return a scenario with what its trace says. Raises `ScenarioError`."""
    spot = scenario.spot
    try:
        found = scaled(recorded(text), spot.instances, spot.trace_from_s)
    except TraceError as why:
        raise ScenarioError(f"{scenario.name}: spot.trace {spot.trace!r} is no trace: {why}") from None
    return replace(scenario, spot=replace(spot, recorded=found))


def decode(text: bytes, name: str) -> Scenario:
    """Return the scenario of a file; its trace is still to be read. Raises `ScenarioError`."""
    try:
        tree = strict_yaml.load(text)
    except (yaml.YAMLError, ValueError) as why:
        raise ScenarioError(f"{name} is no scenario of rollouts: {' '.join(str(why).split())}") from None
    found = _converted(tree, name)
    for each in found.vary:
        varied(found, each)
    return found


def varied(scenario: Scenario, variation: Variation) -> Scenario:
    """Return a scenario as it is otherwise; its trace is still to be read. Raises `ScenarioError`."""
    tree = msgspec.to_builtins(replace(scenario, spot=replace(scenario.spot, recorded=()), vary=()))
    name = f"{scenario.name} with {variation.what!r}"
    try:
        put(tree, variation.set)
    except LookupError as path:
        raise ScenarioError(f"{name}: nothing stands at {str(path)!r}: name a field as in the file") from None
    return _converted(tree, name)


def _converted(tree: object, name: str) -> Scenario:
    try:
        found = msgspec.convert(tree, Scenario)
    except msgspec.ValidationError as why:
        raise ScenarioError(f"{name} is no scenario of rollouts: {why}") from None
    wrong = next(wrongs(found), None)
    if wrong is not None:
        raise ScenarioError(f"{name}: {wrong}")
    return found
