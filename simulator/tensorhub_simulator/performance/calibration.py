"""How far the models are from real runs: a real hub on hosts with shaped wires, and the same on a modelled cluster.

`measured.json` beside this file has the real ones; `python -m benchmarks.network.calibrate` makes it anew. The
parameters in `CALIBRATED` were chosen by these runs; everything else is as production has it.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tensorhub_simulator.performance import baselines
from tensorhub_simulator.performance.config import Cluster, Control, Model, Replicas, Site
from tensorhub_simulator.performance.model.cluster import ClusterRun, run
from tensorhub_simulator.performance.model.network import WIRE

FILE: Final = Path(__file__).with_name("measured.json")
MIB: Final = 1 << 20

CALIBRATED: Final = Control(log_s=0.004, command_s=0.0006, plan_s=0.002, open_s=0.02, batch_s=0.004)
"""The control plane and the event loops of two busy cores that do the work of nine hosts."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The median of some real runs of one kind."""

    mib: int
    mbit: int
    """What each host sends."""
    pipelining: bool
    """Readers read from each other; otherwise each from the trainer: a star."""
    readers: int
    seconds: float
    """From the first call until the last reader has the version."""
    copies_from_trainer: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    times: int
    """Each run is the median of this many."""
    pieces: dict[str, tuple[int, ...]]
    """By MiB of the model: the bytes of its pieces."""
    runs: tuple[Run, ...]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A real run beside the modelled one."""

    real: Run
    seconds: float
    """By the production planner and transfers on the modelled network."""
    copies_from_trainer: float
    baseline_seconds: float | None
    """By the model of the star that others have; only of a star."""

    @property
    def error(self) -> float:
        """Return how much longer the model says it takes, as a part of the real time."""
        return self.seconds / self.real.seconds - 1

    @property
    def baseline_error(self) -> float:
        """Return the same of the baseline's model."""
        assert self.baseline_seconds is not None
        return self.baseline_seconds / self.real.seconds - 1


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of some runs, without their signs."""

    median: float
    worst: float


def load() -> Measured:
    """Read the file."""
    return msgspec.json.decode(FILE.read_bytes(), type=Measured)


def cluster_of(real: Run, pieces: Sequence[int], control: Control = CALIBRATED) -> Cluster:
    """Describe the hosts of a real run."""
    site = Site(gpus_per_host=1, nics_per_host=1, nic_gbit_s=real.mbit / 1e3, efficiency=WIRE, rtt_us=100.0)
    return Cluster(
        name="calibration",
        model=Model(gbytes=sum(pieces) / 1e9, shards=1, piece_bytes=tuple(pieces)),
        sites={"here": site},
        replicas={"trainer": Replicas(site="here", count=1), "rollout": Replicas(site="here", count=real.readers)},
        baseline="star",
        control=control,
    )


def compare(measured: Measured, control: Control = CALIBRATED) -> list[Compared]:
    """Run the model of every real run."""
    found = []
    for real in measured.runs:
        cluster = cluster_of(real, measured.pieces[str(real.mib)], control)
        ours = run(ClusterRun(cluster, pipelining=real.pipelining))
        begin_s = min(each.asked_s for each in ours.updates)
        star = None if real.pipelining else baselines.run(cluster)
        found.append(
            Compared(
                real=real,
                seconds=ours.seconds - begin_s,
                copies_from_trainer=ours.link_bytes["trainer out"] / sum(measured.pieces[str(real.mib)]),
                baseline_seconds=None if star is None else star.seconds,
            )
        )
    return found


def errors(found: Sequence[float]) -> Errors:
    """Return the median and the worst of some relative errors."""
    sizes = [abs(each) for each in found]
    return Errors(median=statistics.median(sizes), worst=max(sizes))
