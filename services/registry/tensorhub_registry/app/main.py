"""`tensorhub-registry`: a registry as a process. Settings come from the environment; SIGTERM or SIGINT ends it."""

import gc
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.config.settings import Settings
from tensorhub_common.service import process
from tensorhub_registry.app import metrics
from tensorhub_registry.app.service import Registry

GC_YOUNG: Final = 20_000
"""The fold makes many small objects that live long: look for garbage more rarely than Python does by itself."""


def main() -> None:
    """Run a registry until a signal ends it."""
    gc.set_threshold(GC_YOUNG, 20, 20)
    process.run("registry", lambda settings: settings.registry_id, _registry)


def _registry(bus: Bus, settings: Settings) -> Registry:
    registry = Registry(bus, settings)
    metrics.watch(registry)
    return registry
