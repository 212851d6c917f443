"""What fresh vLLM engines make of checkpoints: `python -m tests.integrations.vllm.fresh` with JSON on stdin.

    {"checkpoints": ["/a/1", "/a/2"], "prompts": [[1, 5, 9]], "tokens": 16}

It prints, by checkpoint, the greedy tokens of each prompt. Each engine is a process of its own, forked from this one,
which has imported vLLM once.
"""

import json
import os
import sys

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def main() -> None:
    from vllm import LLM, SamplingParams  # noqa: PLC0415 (behind the environment)
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    asked = json.load(sys.stdin)
    sampling = SamplingParams(max_tokens=asked["tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=each) for each in asked["prompts"]]
    made = {}
    for checkpoint in asked["checkpoints"]:
        engine = LLM(
            checkpoint, dtype="float32", enforce_eager=True, max_model_len=512, skip_tokenizer_init=True, seed=0
        )
        ended = engine.generate(prompts, sampling, use_tqdm=False)
        made[checkpoint] = [list(each.outputs[0].token_ids) for each in ended]
        del engine
    print(json.dumps(made), file=sys.__stdout__, flush=True)
    # To take vLLM apart takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
