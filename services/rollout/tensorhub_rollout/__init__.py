"""The rollout manager: prompts in, finished responses out, from engines that come and go (docs/design/rollouts)."""
