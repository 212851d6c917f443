"""Rollouts as the SDK sees them: prompts, responses, what has ended, and the questions to a job's rollout manager.

`aio` and `sync` import it. It imports common, and nothing of the agent's side of the SDK.
"""
