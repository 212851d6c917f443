"""A Ray of this machine, whose workers find a hub, and groups of verl's workers on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import ray
from tests.bounds import WAIT_S
from tests.integrations.verl import workers
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

RAY_STARTS_MAX: Final = 3


@contextmanager
def ray_of(hub: Path, job: str) -> Iterator[None]:
    """Run a Ray whose workers find the hub of a directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORHUB_DIR", str(hub))
        patch.setenv("TENSORHUB_JOB", job)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's processes find other packages called "tests".
        ray.cloudpickle.register_pickle_by_value(workers)
        before = psutil.Process().children()
        for left in reversed(range(RAY_STARTS_MAX)):
            try:
                ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
                break
            except Exception as error:  # Ray waits 30 s for its own processes, which a busy machine may exceed.
                ray.shutdown()
                if not left or "timed out during startup" not in str(error):
                    raise
        began = [each for each in psutil.Process().children() if each not in before]
        yield
        rays = [child for each in began if each.is_running() for child in (each, *each.children(recursive=True))]
        ray.shutdown()
        # Its workers end by themselves, a moment after it has returned.
        assert not psutil.wait_procs(rays, timeout=WAIT_S)[1]


def group_of(count: int, cls: Any, **arguments: Any) -> Any:
    """Return a worker group of verl, on CPUs."""
    pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(cls), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu", use_gpu=False)
