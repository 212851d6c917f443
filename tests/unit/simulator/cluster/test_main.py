"""The program: tables, JSON, the picture, and how it ends when something is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

import pytest

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

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 60.0
BEGUN_TICKS: Final = 150
"""Of processor time: an interpreter has started and imported all by then."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mini.yaml"
    path.write_text(FILE)
    return str(path)


def test_tables_have_the_factor_the_sizes_and_the_assumptions(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, "--processes", "1"]) == 0
    out = capsys.readouterr().out
    assert "mini: seven readers" in out
    assert "slow cards" in out
    assert "with 8 GPUs (the paper measured 4.8" in out
    assert "against 24 real runs" in out


def test_json_is_one_object_a_line_and_the_same_each_time(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, "--json", "--processes", "1"]) == 0
    first = capsys.readouterr().out
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
    assert main([file, "--json", "--processes", "2"]) == 0
    assert capsys.readouterr().out == first


def test_alone_leaves_sizes_and_assumptions_out(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, "--alone", "--json", "--processes", "1"]) == 0
    assert capsys.readouterr().out.count('"type":"pair"') == 1


def test_a_picture_is_an_svg_file_with_both_sides_and_the_links(file: str, tmp_path: Path) -> None:
    path = tmp_path / "mini.svg"
    assert main([file, "--processes", "1", "--picture", str(path)]) == 0
    root = ET.parse(path).getroot()  # noqa: S314 (it was written here)
    words = " ".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))
    for said in ("ours: a line", "baseline: a line", "ours: rollout out", "ours: trainer out", "factor by the number"):
        assert said in words
    first = path.read_bytes()
    assert main([file, "--processes", "1", "--picture", str(path)]) == 0
    assert path.read_bytes() == first


@pytest.mark.long
def test_what_has_no_factor_says_why(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody stays to be filled; and cards so slow that no piece comes within a read's patience."""
    path = Path(file)
    path.write_text(FILE + "spot: {kind: rollout, away_share: 1.0}\n")
    assert main([file, "--alone", "--processes", "1"]) == 0
    assert "no factor with 8 GPUs: on one of the two sides nobody was filled" in capsys.readouterr().out
    assert main([file, "--alone", "--json", "--processes", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["factor"] is None
    path.write_text(FILE.replace("nics_per_host: 1", "nics_per_host: 1, nic_gbit_s: 0.01"))
    assert main([file, "--alone", "--processes", "1"]) == 0
    assert "7 of our updates have no end, for no piece comes within a read's patience" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nothing.yaml"], 1, "'nothing.yaml' can't be read"),
        (["--processes", "0"], 2, "--processes is 0"),
        (["--what"], 2, "unrecognized arguments: --what"),
    ],
)
def test_what_is_wrong_is_one_line_on_stderr(
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


def test_names_are_words_whatever_stands_in_them(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = FILE.replace("name: mini", "name: 'mini [/red] :smile:'").replace("seven readers", "'[bold] seven [/nope]'")
    Path(file).write_text(odd.replace("what: slow cards", "what: '[/q] slow'").replace("rollout", "'r [/x]'"))
    assert main([file, "--processes", "1"]) == 0
    out = capsys.readouterr().out
    for words in ("mini [/red] :smile:: [bold] seven [/nope]", "[/q] slow", "r [/x] in"):
        assert words in out
    Path(file).write_text(FILE.replace("name: mini", 'name: "<mini> & \\x01 名"'))
    path = tmp_path / "odd.svg"
    assert main([file, "--alone", "--processes", "1", "--picture", str(path)]) == 0
    root = ET.parse(path).getroot()  # noqa: S314 (it was written here)
    assert any((each.text or "").startswith("<mini> &   名, 8 GPUs") for each in root.iter())


def test_who_reads_no_further_is_no_error(file: str) -> None:
    program = [sys.executable, "-m", "tensorhub_simulator.performance", file, "--alone", "--json", "--processes", "1"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert "Traceback" not in running.stderr.read()
    assert running.returncode == 0


@pytest.mark.parametrize(("name", "why"), [("no/p.svg", "there is no folder"), (".", "Is a directory")])
def test_a_picture_that_cant_be_written_says_so_before_anything_is_run(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nothing.yaml", "--picture", str(tmp_path / name)]) == 1
    said = capsys.readouterr().err
    assert "the picture can't be written" in said
    assert why in said


def test_a_picture_of_what_has_no_factor_says_so(file: str, tmp_path: Path) -> None:
    Path(file).write_text(FILE.replace("grow", "spot: {kind: rollout, away_share: 1.0}\ngrow"))
    path = tmp_path / "mini.svg"
    assert main([file, "--alone", "--processes", "1", "--picture", str(path)]) == 0
    assert "mini, 8 GPUs: no factor" in path.read_text()


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_full_disk_is_one_line(file: str, how: list[str]) -> None:
    program = [sys.executable, "-m", "tensorhub_simulator.performance", file, "--alone", "--processes", "1", *how]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, check=False, timeout=START_TIMEOUT_S)
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
        pytest.param(False, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(True, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_says_so_once_and_leaves_no_process(tmp_path: Path, number: int, *, begun: bool) -> None:
    """Struck when its processes have just been started, or compute; as a terminal does it, all are struck."""
    path = tmp_path / "long.yaml"
    path.write_text(LONG)
    program = [sys.executable, "-m", "tensorhub_simulator.performance", str(path), "--processes", "2"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as running:
        try:
            workers = _wait_for_workers(running.pid, begun=begun)
            os.killpg(running.pid, number)
            out, err = running.communicate(timeout=STOP_TIMEOUT_S)
        except BaseException:
            # It would be waited for, and compute on.
            os.killpg(running.pid, signal.SIGKILL)
            raise
    said = [line for line in err.splitlines() if not line.startswith(b"simulating: ")]
    assert (running.returncode, out, said) == (128 + number, b"", [b"tensorhub: interrupted"])
    _wait_until_gone(workers)


@pytest.mark.long
def test_its_processes_end_when_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(LONG)
    program = [sys.executable, "-m", "tensorhub_simulator.performance", str(path), "--processes", "2"]
    with subprocess.Popen(program, stderr=subprocess.DEVNULL) as running:
        try:
            workers = _wait_for_workers(running.pid, begun=True)
        finally:
            running.kill()
    _wait_until_gone(workers)


def _wait_for_workers(parent: int, *, begun: bool) -> list[int]:
    """Return the processes of the simulation once they are there, or once they have computed for a moment."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        found = [int(child) for child in children if b"spawn_main" in _command(int(child))]
        if len(found) == 2 and (not begun or all(_ticks(child) > BEGUN_TICKS for child in found)):
            return found
        time.sleep(0.005)
    pytest.fail("no process has come up")


def _wait_until_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(b"spawn_main" in _command(process) for process in processes):
        assert time.monotonic() < deadline, "a process goes on"
        time.sleep(0.005)


def _command(process: int) -> bytes:
    """Return a process's arguments; one that has ended has none."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def _ticks(process: int) -> int:
    """Return the processor time of a process, in hundredths of a second."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0
    return int(words[11]) + int(words[12])


def test_it_needs_nothing_that_a_plain_installation_lacks() -> None:
    """`pip install tensorhub` brings neither numpy nor torch nor UCX."""
    program = (
        "import sys\n"
        "for name in ('numpy', 'torch', 'ucxx', 'cupy', 'matplotlib'): sys.modules[name] = None\n"
        "from tensorhub_simulator.performance.__main__ import main\n"
        "sys.exit(main(['nothing.yaml']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "'nothing.yaml' can't be read" in ended.stderr
