"""Which files of tests take longest, the longest first: they begin first, so that no worker is left alone with one.

And which files one worker runs, since they share the session's hubs: one takes five seconds of a core to start.

Measured with `make test`, in the sum of the tests of each. That a file takes some seconds longer or less is no reason
to change the order; that one takes a minute and is missing here is. `pytest --durations=0` says how long a test took.
"""

from typing import Final

ONE_WORKER: Final = (
    "tests/integration/test_command_line.py",
    "tests/integration/test_mapping.py",
    "tests/integration/test_resharding.py",
    "tests/integration/test_sdk.py",
    "tests/integration/test_installs.py",
    "tests/integration/test_examples.py",
    "tests/integration/test_device_memory.py",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_bad_input_wire.py",
    "tests/integration/test_host_copy.py",
    "tests/integration/test_device_resharding.py",
)
"""The files that use the session's hubs, the longest first: one worker has all of them, and the hubs start once."""

FILES: Final = (
    "tests/property/test_resharding.py",
    "tests/unit/runner/engines/test_exact.py",
    "tests/integration/rollouts/test_rollout_telemetry.py",
    "tests/unit/simulator/test_rollouts.py",
    "tests/integration/rollouts/test_rollouts.py",
    "tests/integration/test_deltas.py",
    "tests/unit/simulator/test_running.py",
    "tests/property/test_catalog.py",
    "tests/unit/agent/transports/test_gather.py",
    "tests/unit/agent/deltas/test_job_deltas.py",
    "tests/unit/simulator/rollout_performance/test_kills.py",
    "tests/unit/runner/engines/test_scoring.py",
    "tests/integration/test_tracing.py",
    "tests/unit/agent/transports/test_contract.py",
    "tests/unit/agent/transports/test_ucxx.py",
    "tests/unit/agent/transports/test_stopped_source.py",
    # So late since their hubs stay until the end, and each takes a tenth of a core by then.
    *ONE_WORKER,
    "tests/integration/test_parts_away.py",
    "tests/integration/test_retention.py",
    "tests/integration/test_retention_disk.py",
    "tests/integration/test_job_deletion.py",
    "tests/integration/test_kills.py",
    "tests/integration/test_upgrading.py",
    "tests/integration/test_bytes.py",
    "tests/integration/planner/test_process.py",
    "tests/integration/up/test_up.py",
    "tests/integration/registry/test_registry.py",
    "tests/integration/registry/test_registry_killed.py",
    "tests/integration/registry/test_snapshots.py",
    "tests/integration/security/test_hub.py",
    "tests/mixed/test_mixed_forms.py",
    "tests/unit/agent/casting/test_fp8.py",
    "tests/unit/agent/transfer/test_site_handoff.py",
    "tests/unit/simulator/cluster/test_main.py",
)
