"""`tensorhub-planner`: a planner as a process. Settings come from the environment; SIGTERM or SIGINT ends it."""

import gc
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.config.settings import Settings
from tensorhub_common.service import process
from tensorhub_planner.app import metrics
from tensorhub_planner.app.service import PlannerService
from tensorhub_planner.primitives.limits import PlanLimits

GC_YOUNG: Final = 50_000
"""Layouts and programs are hundreds of thousands of small objects that live long and form no cycles. To look through
them for garbage as often as Python does by itself takes as long as reading them."""


def main() -> None:
    """Run a planner until a signal ends it."""
    gc.set_threshold(GC_YOUNG, 20, 20)
    process.run("planner", lambda settings: settings.planner_id, _planner)


def _planner(bus: Bus, settings: Settings) -> PlannerService:
    limits = PlanLimits(
        pipelining=settings.pipelining, wan_streams=settings.wan_streams, said_s_max=settings.lost_after_s
    )
    planner = PlannerService(bus, limits, settings.planner_id)
    metrics.watch(planner.counts)
    return planner
