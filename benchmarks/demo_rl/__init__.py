"""`make demo-rl`: the trainer of tensorhub.demo.rl learns undisturbed and with kills; do both learn the same?

docs/guides/reinforcement-learning.md shows what came of it.
"""
