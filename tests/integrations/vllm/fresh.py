"""What fresh vLLM engines make of checkpoints: `python -m tests.integrations.vllm.fresh` with JSON on stdin.

    {"checkpoints": ["/a/1", "/a/2"], "prompts": [[1, 5, 9]], "tokens": 16}

It prints, by checkpoint, the greedy tokens of each prompt. Each engine is a process of its own, forked from this one,
which has imported vLLM and made no engine.
"""

import json
import os
import sys
from typing import Any

from tests.integrations.vllm.processes import ENVIRONMENT

os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main() -> None:
    import vllm.v1.worker.cpu_worker  # noqa: F401, PLC0415 (behind the environment; the engines find it imported)
    from vllm import LLM, SamplingParams  # noqa: PLC0415
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    asked = json.load(sys.stdin)

    def made_of(checkpoint: str) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=asked["tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
        engine = LLM(
            checkpoint,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
        )
        prompts = [TokensPrompt(prompt_token_ids=each) for each in asked["prompts"]]
        return [list(each.outputs[0].token_ids) for each in engine.generate(prompts, sampling, use_tqdm=False)]

    made = {checkpoint: in_child(made_of, checkpoint) for checkpoint in asked["checkpoints"]}
    print(json.dumps(made), flush=True)


def in_child(function: Any, checkpoint: str) -> list[list[int]]:
    reader, writer = os.pipe()
    if not os.fork():
        os.close(reader)
        with os.fdopen(writer, "w") as told:
            json.dump(function(checkpoint), told)
        # To take vLLM apart takes seconds.
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        found: list[list[int]] = json.load(told)
    os.wait()
    return found


if __name__ == "__main__":
    main()
