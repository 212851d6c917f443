"""What generates: engines that a runner begins and stops attempts at, and steps. docs/design/rollouts/engine.md.

`engine` is what every engine promises, and needs neither torch nor numpy. `torch_engine` is the one of this tree. It
imports torch and transformers, which come with the extra `engine-torch`; nothing outside of here imports either.

Seams: `engine`, `kv_cache`, `models`, `packed_model`, `philox`, `sampling`, `schedule`, `torch_engine`.
"""
