"""A model's tokenizer and chat template, and text from tokens as they come. It has no I/O but the tokenizer's files.

`app` imports it. It imports `sessions`, and transformers where it is given a directory.

Seams: `tokenizer`.
"""
