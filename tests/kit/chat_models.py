"""A tiny chat model: a tokenizer of bytes with some pairs, its template, and a configuration."""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
PAIRS: Final = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "or", "it", "is", "ab", "ll", "oo", "us")
"""Pairs of letters that are one token, so that text has other tokens than a model may have made."""
TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}


def tiny_tokenizer(template: str = TEMPLATE, size: int = 0) -> PreTrainedTokenizerFast:
    """Return a tokenizer; of `size` tokens, where it would have fewer. No text is made of those that are added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *PAIRS]
    words += [f"word{number}" for number in range(size - len(words) - len((START, END, PAD)))]
    tokenizer = Tokenizer(
        BPE(vocab={word: at for at, word in enumerate(words)}, merges=[(each[0], each[1]) for each in PAIRS])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=[START]
    )
    made.chat_template = template
    return made


def save_chat_model(directory: Path, size: int = 0, **more: Any) -> None:
    """Write a tokenizer and a configuration; weights come through the hub."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(size=size)
    tokenizer.save_pretrained(str(directory))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    (directory / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": len(tokenizer), **ends, **more}))
