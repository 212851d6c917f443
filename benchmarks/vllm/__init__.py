"""Benchmarks with a real vLLM; they run in its environment, which `make integrations NAMES=vllm` makes."""
