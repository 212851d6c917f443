"""Every fault that a seed may have.

A new fault is one more row in the file of its kind. It changes no seed in which it does not strike.
"""

from typing import Final

from tensorhub_simulator.faultsim.faults.injector import Fault
from tensorhub_simulator.faultsim.faults.partitions import PARTITIONS
from tensorhub_simulator.faultsim.faults.process_faults import PROCESS_FAULTS
from tensorhub_simulator.faultsim.faults.source_faults import SOURCE_FAULTS

ALL: Final[tuple[Fault, ...]] = (*PROCESS_FAULTS, *PARTITIONS, *SOURCE_FAULTS)
