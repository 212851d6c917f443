"""Reinforcement learning to copy from: `trainer`, which learns from responses that runners generate.

`clock` is the model and what it learns; `step_facts` is what the trainer reports of each step,
and writes down of lengths.
"""
