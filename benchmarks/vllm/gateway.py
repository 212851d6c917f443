"""What the gateway costs beside vLLM's own endpoint: chat with the same server, through a hub and at once.

    .venv-vllm/bin/python -m benchmarks.vllm.gateway --sessions 8 32 --docs

One vLLM server. The gateway's calls go through log, manager and the runner beside that server; the others go to the
server's `/v1/chat/completions`. Both have the same clients and the same model, by turns.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.integrations.vllm.conftest import free_port
from tests.integrations.vllm.processes import VllmProcess
from tests.kit.chat_models import tiny_tokenizer
from tests.kit.waiting import until
from transformers import Qwen2ForCausalLM

import tensorhub
from benchmarks import page
from benchmarks.rollouts.gateway import MODEL, ROOT, load, table
from benchmarks.vllm.model import VOCABULARY, saved_model
from tensorhub._control import hub_file
from tensorhub.local.hub import LocalHub, LocalRollouts

PAGE: Final = page.DOCS / "rollouts" / "vllm.md"
READY_S: Final = 300.0
SLOTS: Final = 64


async def serve(directory: Path, tokens: int) -> None:
    """Be the trainer: take sessions and acknowledge them."""
    found = hub_file.read(directory / "hub")
    module = Qwen2ForCausalLM.from_pretrained(directory / "model")
    async with await tensorhub.connect_async("default", agent=found.agents[0].socket, nats=found.nats_all) as hub:
        policy = await hub.register(MODEL, module, replica="trainer", resume="values")
        await policy.publish()
        sampling = tensorhub.Sampling(max_tokens=tokens, seed=3)
        rollouts = await hub.rollouts(MODEL, staleness=1 << 20, sampling=sampling)

        async def serves() -> bool:
            return any(each.state == "serving" for each in (await rollouts.status()).instances)

        await until(serves, "the runner serves", READY_S)
        async with rollouts.gateway(directory / "model") as gateway:
            print(json.dumps(gateway.port), flush=True)
            async for batch in rollouts.batches(wait_s=3600):
                await batch.done()


@asynccontextmanager
async def running(command: list[str], environment: dict[str, str], log: Path) -> AsyncIterator[subprocess.Popen[str]]:
    """Run a process of ours until the end."""
    with log.open("ab") as errors:
        process = subprocess.Popen(  # noqa: ASYNC220 (it starts at once)
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def measure(sessions: list[int], calls: int, tokens: int, rounds: int, directory: Path) -> str:
    """Return a table."""
    saved_model(directory / "model", layers=2, hidden=256)
    tiny_tokenizer(size=VOCABULARY).save_pretrained(str(directory / "model"))
    server = VllmProcess(
        directory / "model",
        free_port(),
        directory / "server.log",
        ("--served-model-name", MODEL),
        speaks=("--enable-scale-out",),
    )
    server.start()
    whole = {**os.environ, "PYTHONPATH": str(ROOT)}
    runner = ["tensorhub_launcher", "runner", "--engine", "vllm", "--url", server.url, "--slots", str(SLOTS)]
    runner += ["--dir", str(directory / "hub"), "--hub-model", MODEL, "--replica", "one"]
    own = ["benchmarks.vllm.gateway", "--serve", "--directory", str(directory), "--tokens", str(tokens)]
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
    try:
        await server.ready()
        async with (
            LocalHub(directory / "hub", rollouts=LocalRollouts()),
            running(runner, whole, directory / "runner.log") as beside,
            running(own, whole, directory / "gateway.log") as gateway,
        ):
            assert gateway.stdout is not None
            async with asyncio.timeout(READY_S):
                port = int(await asyncio.to_thread(gateway.stdout.readline))
            at_once = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, "logprobs": True}
            for round_ in range(rounds):
                for count in sessions:
                    for kind in ("gateway", "vLLM"):
                        pids, to, more = ([gateway.pid, beside.pid], port, {})
                        if kind == "vLLM":
                            assert server.process is not None
                            pids, to, more = [server.process.pid], server.port, at_once
                        row = await load(kind, to, pids, count, calls, tokens, round_, more=more)
                        rows.setdefault((count, kind), []).append(row)
                        print(json.dumps(row), file=sys.stderr, flush=True)
    finally:
        server.kill()
    return table(rows.values())


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 32], help="sessions at once, one run each")
    parser.add_argument("--calls", type=int, default=2, help="calls of a session")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median is told")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.directory, given.tokens))
        return
    with tempfile.TemporaryDirectory() as folder:
        made = asyncio.run(measure(given.sessions, given.calls, given.tokens, given.rounds, Path(folder)))
    sys.stdout.write(f"{made}\n")
    if given.docs:
        page.write("vllm-gateway", made, PAGE)


if __name__ == "__main__":
    main()
