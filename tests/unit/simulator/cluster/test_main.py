"""The program: tables, JSON, the picture, and how it ends when something is wrong."""

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Final

import pytest
from tests.bounds import WAIT_S
from tests.kit.waiting import children_of, is_alive, wait_until

from tensorhub_simulator.performance.__main__ import main

FILE: Final = """
name: mini
about: seven readers
model: {gbytes: 1, shards: 1}
sites: {here: {gpus_per_host: 1, nics_per_host: 1}}
replicas: {trainer: {site: here, count: 1}, rollout: {site: here, count: 7}}
baseline: star
grow: {kind: rollout, gpus: [4]}
vary: [{what: slow cards, set: {sites.here.nic_gbit_s: 10}}]
"""
NOBODY: Final = FILE + "spot: {kind: rollout, away_share: 1.0}\n"

BEGUN_TICKS: Final = 150
"""Of processor time: an interpreter has started and imported all by then."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mini.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what it prints."""

    def show(*arguments: str, processes: int = 1) -> str:
        assert main([*arguments, "--processes", str(processes)]) == 0
        return capsys.readouterr().out

    return show


def words_of(path: Path) -> str:
    root = ET.parse(path).getroot()  # noqa: S314 (it was written here)
    return " ".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))


def test_tables_have_the_factor_the_sizes_and_the_assumptions(file: str, shown: Any) -> None:
    """Names are words whatever stands in them."""
    out = shown(file)
    for words in ("mini: seven readers", "slow cards", "with 8 GPUs (the paper measured 4.8", "against 24 real runs"):
        assert words in out
    odd = FILE.replace("name: mini", "name: 'mini [/red] :smile:'").replace("seven readers", "'[bold] seven [/nope]'")
    Path(file).write_text(odd.replace("what: slow cards", "what: '[/q] slow'").replace("rollout", "'r [/x]'"))
    out = shown(file)
    for words in ("mini [/red] :smile:: [bold] seven [/nope]", "[/q] slow", "r [/x] in"):
        assert words in out


@pytest.mark.long
def test_json_is_one_object_a_line_and_the_same_each_time(file: str, shown: Any) -> None:
    first = shown(file, "--json")
    found = [json.loads(line) for line in first.splitlines()]
    pairs = [each for each in found if each["type"] == "pair"]
    assert [(each["kind"], each["gpus"]) for each in pairs] == [("itself", 8), ("size", 4), ("variation", 8)]
    whole = pairs[0]
    assert whole["factor"] == pytest.approx(whole["baseline"]["stall_s"]["mean"] / whole["ours"]["stall_s"]["mean"])
    updates = [each for each in found if each["type"] == "update"]
    assert sorted(each["replica"] for each in updates if each["side"] == "ours") == list(range(7))
    calibration = found[-1]
    assert calibration["type"] == "calibration"
    assert calibration["ours"]["median"] < 0.05
    assert calibration["ours"]["worst"] < 0.25
    assert calibration["baseline"]["worst"] < 0.1
    assert shown(file, "--json", processes=2) == first
    assert shown(file, "--alone", "--json").count('"type":"pair"') == 1


@pytest.mark.long
def test_a_picture_is_an_svg_file_with_both_sides_and_the_links(file: str, tmp_path: Path, shown: Any) -> None:
    path = tmp_path / "mini.svg"
    pictures = []
    for _ in range(2):
        shown(file, "--picture", str(path))
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
    for said in ("ours: a line", "baseline: a line", "ours: rollout out", "ours: trainer out", "factor by the number"):
        assert said in words_of(path)
    Path(file).write_text(FILE.replace("name: mini", 'name: "<mini> & \\x01 名"'))
    shown(file, "--alone", "--picture", str(path))
    assert "<mini> &   名, 8 GPUs" in words_of(path)
    Path(file).write_text(NOBODY)
    shown(file, "--alone", "--picture", str(path))
    assert "mini, 8 GPUs: no factor" in words_of(path)


@pytest.mark.long
def test_what_has_no_factor_says_why(file: str, shown: Any) -> None:
    """Nobody stays to be filled; and cards so slow that no piece comes within a read's patience."""
    Path(file).write_text(NOBODY)
    assert "no factor with 8 GPUs: on one of the two sides no replica was filled" in shown(file, "--alone")
    assert json.loads(shown(file, "--alone", "--json").splitlines()[0])["factor"] is None
    Path(file).write_text(FILE.replace("nics_per_host: 1", "nics_per_host: 1, nic_gbit_s: 0.01"))
    assert "7 of our updates have no end, for no piece comes within a read's patience" in shown(file, "--alone")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nothing.yaml"], 1, "'nothing.yaml' can't be read"),
        (["--processes", "0"], 2, "--processes is 0"),
        (["--what"], 2, "unrecognized arguments: --what"),
        (["nothing.yaml", "--picture", "no/p.svg"], 1, "there is no folder"),
        (["nothing.yaml", "--picture", "."], 1, "the picture can't be written"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_run(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(arguments)
    except SystemExit as why:
        ended = why.code if isinstance(why.code, int) else -1
    out, err = capsys.readouterr()
    assert (ended, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("tensorhub: ")
    assert said in err


# ---------------------------------------------------------------------------------------------------------- processes


def program(*arguments: str, processes: int = 1) -> list[str]:
    return [sys.executable, "-m", "tensorhub_simulator.performance", *arguments, "--processes", str(processes)]


@pytest.mark.long
def test_who_reads_no_further_is_no_error_and_a_full_disk_is_one_line(file: str) -> None:
    json_of_one = program(file, "--alone", "--json")
    with subprocess.Popen(json_of_one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert "Traceback" not in running.stderr.read()
    assert running.returncode == 0
    for command in (json_of_one, program(file, "--alone")):
        with Path("/dev/full").open("wb") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, timeout=WAIT_S)
        assert ended.returncode == 1
        assert ended.stderr == b"tensorhub: what came of it can't be written: No space left on device\n"


LONG: Final = """
name: long
model: {gbytes: 200, shards: 1, piece_mib: 4}
sites: {here: {gpus_per_host: 1, nics_per_host: 1}}
replicas: {trainer: {site: here, count: 1}, rollout: {site: here, count: 500}}
baseline: star
vary: [{what: other, set: {seed: 2}}, {what: more, set: {seed: 3}}]
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("begun", "number"),
    [
        (False, signal.SIGTERM),
        (True, signal.SIGINT),
        (True, signal.SIGKILL),
        pytest.param(False, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(True, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_struck_says_so_once_and_leaves_no_process(tmp_path: Path, number: int, *, begun: bool) -> None:
    """Struck when its processes have just been started, or compute; as a terminal does it, all are, but by a kill."""
    path = tmp_path / "long.yaml"
    path.write_text(LONG)
    command = program(str(path), processes=2)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as running:
        try:
            wait_until(lambda: len(workers_of(running.pid, begun=begun)) == 2)
            workers = workers_of(running.pid, begun=False)
            (os.kill if number == signal.SIGKILL else os.killpg)(running.pid, number)
            out, err = running.communicate(timeout=WAIT_S)
        except BaseException:
            # It would be waited for, and compute on.
            os.killpg(running.pid, signal.SIGKILL)
            raise
    if number != signal.SIGKILL:
        said = [line for line in err.splitlines() if not line.startswith(b"simulating: ")]
        assert (running.returncode, out, said) == (128 + number, b"", [b"tensorhub: interrupted"])
    wait_until(lambda: not any(is_alive(each) for each in workers))


def workers_of(parent: int, *, begun: bool) -> list[int]:
    """Return the processes of the simulation that are there, or that have computed for a moment."""
    return [
        child
        for child in children_of(parent)
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes() and (not begun or ticks(child) > BEGUN_TICKS)
    ]


def ticks(process: int) -> int:
    """Return the processor time of a process, in hundredths of a second."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def test_it_needs_nothing_that_a_plain_installation_lacks() -> None:
    """`pip install tensorhub` brings neither numpy nor torch nor UCX."""
    code = (
        "import sys\n"
        "for name in ('numpy', 'torch', 'ucxx', 'cupy', 'matplotlib'): sys.modules[name] = None\n"
        "from tensorhub_simulator.performance.__main__ import main\n"
        "sys.exit(main(['nothing.yaml']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "'nothing.yaml' can't be read" in ended.stderr
