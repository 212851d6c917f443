"""TRL's GRPOTrainer with TensorHub: runners generate the completions, on the weights of each step.

tensorhub up --runners 2 --model MODEL &     (a folder with the config.json of docs/guides/trl.md)
python examples/trl_grpo.py MODEL

examples/trl_grpo_alone.py is the same without TensorHub.
"""

import argparse
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from tensorhub.integrations.trl import HubRollouts

WORDS = ["<bos>", "<eos>", "<pad>", *(f"w{number}" for number in range(3, 64))]
WANTED = {f"w{number}" for number in range(3, 64, 4)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token is one word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def reward(completions: list[str], **_: object) -> list[float]:
    """The share of a completion's words that are wanted ones: a quarter of all, to begin with."""
    return [sum(word in WANTED for word in each.split()) / 16 for each in completions]


def main() -> None:
    """Train for some steps, and show how the reward rises."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    set_seed(0)
    dataset = Dataset.from_dict({"prompt": [f"w{number} w{number + 1} w{number + 2}" for number in range(3, 61)]})
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model)),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=16,
            learning_rate=5e-3,
            max_steps=options.steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
        processing_class=build_tokenizer(),
        rollout_func=(rollouts := HubRollouts("policy")),
    )
    with rollouts:
        trainer.train()
    for step in (each for each in trainer.state.log_history if "reward" in each):
        print(f"step {step['step']}: reward {step['reward']:.2f}")


if __name__ == "__main__":
    main()
