"""Rollouts as the SDK sees them: prompts, responses, what has ended, and the questions to a job's rollout manager.

`records` are responses in files, and `replay` judges what scoring them again has found.

`aio` and `sync` import it. It imports common, and nothing of the agent's side of the SDK.
"""
