"""`make mixed`: the release before and today's in one hub, each part upgraded in turn and rolled back.

After each step models of both are published and read in every way by SDKs of both, and all bytes are compared. At the
end the job is raised, and the older release must stop at it with a sentence.
"""

import argparse
import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file
from tests.kit.processes import Run, WorkerError, clean_environment, conversing, executed
from tests.kit.waiting import until
from tests.kit.worker import digest, values
from tests.mixed.differences import differences, forms_of
from tests.mixed.hub import NEW, OLD, Mixed, Tally, Traffic, Wrong, mixed_hub
from tests.mixed.release import BEFORE, NoRelease, commit_of, python_of

from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL

PARTS: Final = ("planner-0", "registry-1", "registry-0", "agent-0", "agent-1", "agent-2")
CONTROL: Final = PARTS[:3]
ORDERS: Final = {
    "planner, registries, agents": PARTS,
    "agents, registries, planner": (*PARTS[3:], "registry-0", "registry-1", "planner-0"),
}
USERS: Final = dict(zip(ORDERS, (OLD, NEW), strict=True))
"""Which release's permissions NATS goes by in each order: an upgrade may come before that of NATS, or after it."""
STOPPED: Final = "another version of the registry has spoken"
END_S: Final = 60.0
STOP_WAIT_S: Final = 20.0
WIDTHS: Final = (40, 10, 7, 7, 11, 5, 5, 5, 7)


class Table:
    """What was seen, a row a step."""

    def __init__(self) -> None:
        self.wrongs: list[str] = []

    def head(self, title: str) -> None:
        print(f"\n{title}")
        print(_line("step", "leads", "regs", "planner", "agents", "publ.", "reads", "MB", "slowest"))

    def row(self, step: str, led: str, hub: Mixed, tally: Tally) -> None:
        runs = hub.runs
        regs = ",".join(runs[name] for name in ("registry-0", "registry-1"))
        agents = ",".join(runs[name] for name in PARTS[3:])
        done = (str(tally.publishes), str(tally.reads), f"{tally.nbytes / 1e6:.1f}", f"{tally.slowest_s:.2f}s")
        print(_line(step, led, regs, runs["planner-0"], agents, *done), flush=True)

    def wrong(self, step: str, why: BaseException | str) -> None:
        print(f"{step:44s} WRONG: {why}", flush=True)
        self.wrongs.append(f"{step}: {why}")


def _line(*cells: str) -> str:
    return "  ".join(f"{cell:{width}s}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


async def _leader(hub: Mixed, was: str) -> str:
    """Return which registry leads, by its answer; while none does, which did."""
    async with hub.registry("mixed") as registry:
        with contextlib.suppress(TensorHubError):
            return (await registry.status(1.0)).registry
    return was


async def roll(title: str, order: Sequence[str], pythons: dict[str, str], table: Table) -> None:
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-mixed-"))
    table.head(f"in turn: {title}; NATS goes by the permissions of the {USERS[title]} release")
    step = "begin with the older release"
    hub: Mixed | None = None
    try:
        async with mixed_hub(directory, pythons, OLD, USERS[title]) as hub, Traffic(hub, "mixed").begun() as traffic:
            led = await _leader(hub, "")
            table.row(step, led, hub, await traffic.step())
            turns = [(name, NEW) for name in order] + [(name, OLD) for name in reversed(order)]
            turns += [(name, NEW) for name in order]
            for number, (name, release) in enumerate(turns):
                how = signal.SIGTERM if number % 3 == 1 else signal.SIGKILL
                led = await _leader(hub, led)
                step = f"{name} becomes {release} ({how.name})"
                if name in CONTROL:
                    _, tally = await asyncio.gather(hub.run_as(name, release, how), traffic.step())
                else:
                    await hub.run_as(name, release, how)
                    tally = await traffic.step()
                table.row(step, led, hub, tally)
            step = f"the job is raised to level {NEWEST_LEVEL}"
            async with hub.registry("mixed") as registry:
                await registry.raise_level(NEWEST_LEVEL, 10.0)
            table.row(step, led, hub, await traffic.step())
            led = await _leader(hub, led)
            standby = "registry-1" if led == "registry-0" else "registry-0"
            step = f"{standby} becomes old: stops the job"
            await hub.run_as(standby, OLD)
            tally = await traffic.step()
            await _stopped(hub, standby)
            table.row(step, led, hub, tally)
            led = await _leader(hub, led)
            step = f"{standby} becomes new again"
            await hub.run_as(standby, NEW)
            table.row(step, led, hub, await traffic.step())
    except Wrong as why:
        table.wrong(step, why)
        _print_logs(hub)
    except Exception:  # noqa: BLE001 (what went wrong is printed, and the next order is tried)
        table.wrong(step, traceback.format_exc())
        _print_logs(hub)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


COMMAND: Final = "from tensorhub.cli.main import main; main()"


async def commands(pythons: dict[str, str], table: Table) -> None:
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-mixed-"))
    print("\none directory: which release runs 'tensorhub up', which publishes, which pulls")
    version = 0
    try:
        for runs in (OLD, NEW, OLD):
            up = _command(pythons[runs], "up", "--agents", "1")
            async with conversing("tensorhub up", executed(up, _environment(directory))) as hub:
                # It prints how to connect once it is ready.
                await hub.line()
                for publishes, pulls in ((OLD, NEW), (NEW, OLD)):
                    version += 1
                    step = f"up {runs}, publish {publishes}, pull {pulls}"
                    await asyncio.to_thread(_publish_and_pull, pythons, directory, publishes, pulls, version)
                    print(f"{step:40s} version {version}: equal bytes", flush=True)
                hub.signal(signal.SIGINT)
                await hub.code(END_S)
    except (Wrong, WorkerError, TimeoutError) as why:
        table.wrong(f"commands, version {version}", why)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _publish_and_pull(pythons: dict[str, str], directory: Path, publishes: str, pulls: str, version: int) -> None:
    given, got = directory / "given.safetensors", directory / "got.safetensors"
    save_file(values(version), given)
    for release, order in (
        (publishes, ("publish", "policy", "--version", str(version), str(given))),
        (pulls, ("pull", "policy", "--version", str(version), str(got))),
        (pulls, ("versions", "policy", "--json")),
        (publishes, ("status", "--json")),
    ):
        code, out, err = Run(executed(_command(pythons[release], *order), _environment(directory))).ended()
        if code:
            raise Wrong(f"{' '.join(order)} ({release}): {(err or out)[-600:]}")
    if digest(load_file(got)) != digest(values(version)):
        raise Wrong(f"version {version} was pulled ({pulls}) with other bytes than were published ({publishes})")


def _command(python: str, *arguments: str) -> tuple[str, ...]:
    return (python, "-P", "-c", COMMAND, *arguments)


def _environment(directory: Path) -> dict[str, str]:
    return clean_environment(TENSORHUB_DIR=str(directory / "hub"), TENSORHUB_NEW_JOB_LEVEL="0")


async def _stopped(hub: Mixed, registry: str) -> None:
    try:
        await until(lambda: STOPPED in hub.log(registry), timeout_s=STOP_WAIT_S)
    except AssertionError:
        raise Wrong("the older registry did not log that it stops the job") from None


def _print_logs(hub: Mixed | None) -> None:
    if hub is None:
        return
    for name in hub.runs:
        lines = [each for each in hub.log(name).splitlines() if "warn" in each.lower() or "error" in each.lower()]
        print(*(f"    {name} ({hub.runs[name]}): {each[:400]}" for each in lines[-3:]), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mixed.mixed", description=__doc__)
    parser.add_argument("--release", default=BEFORE, help="the commit of the older release")
    parser.add_argument("--order", choices=[*ORDERS, "commands", "all"], default="all", help="one of them alone")
    arguments = parser.parse_args()
    try:
        pythons = {OLD: str(python_of(arguments.release)), NEW: sys.executable}
    except NoRelease as why:
        print(f"mixed: {why}", file=sys.stderr)
        return 2
    print(f"the older release is {commit_of(arguments.release)[:12]}, the newer one is this checkout")
    table = Table()
    for sentence in differences(forms_of(pythons[OLD]), forms_of(pythons[NEW])):
        table.wrong("messages and stored forms", sentence)
    for title, order in ORDERS.items():
        if arguments.order in ("all", title):
            asyncio.run(roll(title, order, pythons, table))
    if arguments.order in ("all", "commands"):
        asyncio.run(commands(pythons, table))
    print()
    for sentence in table.wrongs:
        print(f"WRONG: {sentence}")
    print("mixed releases: " + (f"{len(table.wrongs)} wrong" if table.wrongs else "nothing wrong"))
    return 1 if table.wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
