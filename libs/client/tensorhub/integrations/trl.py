"""TRL's `GRPOTrainer` with the hub: its weights become versions, and runners generate its completions.

    from tensorhub.integrations.trl import HubRollouts

    with HubRollouts("policy") as rollouts:
        trainer = GRPOTrainer(..., rollout_func=rollouts)
        trainer.train()

Always true: what is published is a copy in hub memory, so the optimizer may write its parameters at any time; each
completion was begun on the weights of the trainer's present step; and the tokens that TRL trains on are those that an
engine made, never tokenised again.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import tensorhub
from tensorhub import NotInThisVersion, TensorHubError

if TYPE_CHECKING:
    import torch

REFUSED: Final[dict[str, tuple[object, ...]]] = {
    "use_vllm": (False,),
    "use_transformers_continuous_batching": (False,),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "cache_implementation": (None,),
    "generation_kwargs": (None, {}),
    "vllm_structured_outputs_regex": (None,),
}
"""Settings of `GRPOConfig` that runners can't follow, with the values that ask for nothing."""


class HubRollouts:
    """A `rollout_func` of one `GRPOTrainer`, to be called by it.

    At the trainer's first generation it registers the weights with the hub and attaches to the job's rollouts. Then it
    publishes them whenever the trainer's step has changed, and has runners generate.

    The sampling is the trainer's: `temperature`, `top_p`, `top_k`, `max_completion_length`, `seed` and the tokens that
    end a completion. What runners can't follow is refused at the first generation. Reward functions get
    `token_versions` (for each token, the version that made it), `finish_reason` and `age` of each completion.

    Examples:
        >>> with HubRollouts("policy") as rollouts:
        ...     GRPOTrainer(model, reward, args, dataset, processing_class=tokenizer, rollout_func=rollouts).train()
    """

    def __init__(
        self,
        model: str = "policy",
        *,
        hub: "tensorhub.Hub | None" = None,
        replica: str = "trainer",
        name: str = "main",
        epoch: int | None = None,
        corrects: bool = True,
        wait_s: float = 600,
        publish_s: float = 60,
    ) -> None:
        """Nothing is connected before the first generation.

        Args:
            model: The model's name in the hub, as runners follow it.
            hub: A connection; None: `tensorhub.connect()`, which `close` then ends.
            replica: The name of the trainer's copy of the weights.
            name: The consumer's name. One trainer at a time has it.
            epoch: The number of the trainer's history; a higher one drops what an earlier trainer of the name left.
                None is the time in seconds, so a trainer that starts again, from a checkpoint or not, begins clean.
            corrects: TRL weighs each token by how likely it is to the trainer and was to the engine, as it does with
                vLLM: `vllm_importance_sampling_correction` and its `mode` and `clip` settings of `GRPOConfig` hold. It
                takes one more forward pass for each generation. False: TRL takes the engine for the trainer.
            wait_s: So long a generation may bring nothing, in seconds.
            publish_s: The bound in seconds of each of the calls that publish.
        """
        self._model, self._replica, self._name = model, replica, name
        self._epoch = int(time.time()) if epoch is None else epoch
        self._corrects = corrects
        self._wait_s, self._publish_s = wait_s, publish_s
        self._hub, self._owns_hub = hub, hub is None
        self._trainer: Any = None
        self._shard: tensorhub.Shard | None = None
        self._rollouts: tensorhub.Rollouts | None = None
        self._published: tuple[Any, int] = (None, 0)
        """The trainer's state and its step when its weights were last published. Each `train()` has a state of its own,
        which is kept here so that no other can be taken for it."""
        self._generations = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:  # noqa: ANN401 (TRL has no types here)
        """Generate one completion for each of the prompts, which TRL repeats `num_generations` times in a row.

        Raises:
            NotInThisVersion: The trainer asks for what runners can't follow.
            TensorHubError: A completion could not be made, or what publishing and `batches` raise.
        """
        self._take(trainer)
        state, step = self._published
        if state is not trainer.state or step != trainer.state.global_step:
            self.sync_weights()
        trains = trainer.model.training
        size = trainer.num_generations if trains else trainer.num_generations_eval
        groups = self._submit(_tokenised(_each_once(prompts, size), trainer), size, trainer)
        rows = self._rows(groups, size)
        return {
            "prompt_ids": [each.prompt_ids.tolist() for each in rows],
            "completion_ids": [each.token_ids.tolist() for each in rows],
            "logprobs": [each.logprobs.tolist() for each in rows],
            "token_versions": [each.versions.tolist() for each in rows],
            "finish_reason": [each.finish_reason for each in rows],
            "age": [each.age for each in rows],
        }

    @property
    def version(self) -> int | None:
        """The version that was last published; None: none yet."""
        return None if self._shard is None else self._shard.version

    def sync_weights(self) -> None:
        """Publish the trainer's weights as they are now.

        It is called when the trainer's step has changed; call it yourself where something else has changed the weights,
        such as `load_best_model_at_end`. TRL calls it by this name, as it does with vLLM.
        """
        if self._shard is None:
            raise TensorHubError("there is no trainer yet: its first generation registers and publishes its weights")
        import torch  # noqa: PLC0415 (it takes seconds, and this module is read for its names too)

        given = _weights_of(self._trainer)
        with self._shard.overwriting(publish=True, timeout_s=self._publish_s) as tensors, torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(given[name])
        self._published = (self._trainer.state, self._trainer.state.global_step)

    def close(self) -> None:
        """Detach, and release the weights. A second call does nothing."""
        rollouts, self._rollouts = self._rollouts, None
        shard, self._shard = self._shard, None
        hub, self._hub = self._hub, None if self._owns_hub else self._hub
        try:
            if rollouts is not None:
                rollouts.close()
        finally:
            try:
                if shard is not None:
                    shard.release()
            finally:
                if hub is not None and self._owns_hub:
                    hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ the trainer

    def _take(self, trainer: Any) -> None:  # noqa: ANN401 (as above)
        """Register the trainer's weights and attach, once."""
        if self._trainer is not None:
            if trainer is not self._trainer:
                raise TensorHubError("this HubRollouts has another trainer: make one for each trainer")
            if self._rollouts is None:
                raise TensorHubError("this HubRollouts was closed: make another one, and a trainer with it")
            return
        _check(trainer)
        if self._hub is None:
            self._hub = tensorhub.connect()
        self._shard = self._hub.register(
            self._model, _weights_of(trainer), replica=self._replica, resume="values", timeout_s=self._publish_s
        )
        # Each group has an id that the same program gives again, so its completions draw the same noise again.
        self._rollouts = self._hub.rollouts(
            self._model, name=self._name, epoch=self._epoch, sampling=_sampling(trainer)
        )
        self._trainer = trainer
        if self._corrects and trainer.args.vllm_importance_sampling_correction:
            # TRL has this correction for vLLM alone; behind `use_vllm` it asks for no more than `sync_weights`.
            trainer.use_vllm, trainer.vllm_generation = True, self
            trainer._last_loaded_step = trainer.state.global_step  # noqa: SLF001 (TRL sets it where it makes its own vLLM)

    def _submit(self, prompts: Sequence[Sequence[int]], size: int, trainer: Any) -> list[str]:  # noqa: ANN401 (as above)
        assert self._rollouts is not None
        first = f"{trainer.state.global_step}-{self._generations}"
        self._generations += 1
        given = [tensorhub.Prompt(ids, id=f"{first}-{number}") for number, ids in enumerate(prompts)]
        return self._rollouts.submit(given, group_size=size)

    def _rows(self, groups: list[str], size: int) -> list[tensorhub.Response]:
        """Return the responses in the order of their prompts."""
        assert self._rollouts is not None
        found: dict[tuple[str, int], tensorhub.Response] = {}
        for batch in self._rollouts.batches(len(groups) * size, wait_s=self._wait_s, groups=groups):
            for each in batch.responses:
                if each.finish_reason not in ("stop", "length"):
                    raise TensorHubError(_why_not(each))
                found[each.group, each.index] = each
            batch.done()
        return [found[group, index] for group in groups for index in range(size)]


def _why_not(response: tensorhub.Response) -> str:
    which = f"completion {response.index} of the prompt of {len(response.prompt_ids)} tokens (group {response.group})"
    if response.finish_reason == "cancelled":
        return f"{which} was cancelled, by hand or by a trainer with a higher epoch: start the training again"
    return f"{which} could not be made: {response.error}"


def _check(trainer: Any) -> None:  # noqa: ANN401 (TRL is in no environment of the checks)
    """Raise `NotInThisVersion` where the trainer asks for what runners can't follow."""
    for setting, neutral in REFUSED.items():
        value = getattr(trainer.args, setting, neutral[0])
        if value not in neutral:
            raise NotInThisVersion(
                f"{setting}={value!r:.80} of GRPOConfig can't be followed by runners: leave it at {neutral[-1]!r}"
            )
    if trainer.args.max_completion_length is None:
        raise NotInThisVersion("max_completion_length=None has no limit for runners: set it in GRPOConfig")
    for what, is_asked in _unlike(trainer):
        if is_asked:
            raise NotInThisVersion(f"HubRollouts can't generate for a trainer {what}")


def _unlike(trainer: Any) -> Iterator[tuple[str, bool]]:  # noqa: ANN401 (as above)
    """Yield kinds of trainers that are not supported, each with whether this is one."""
    count = trainer.accelerator.num_processes
    yield f"of {count} processes: train in one process, or see 'bring your own trainer' in the guides", count > 1
    yield "under DeepSpeed: take its weights together first, or train without it", trainer.is_deepspeed_enabled
    yield "under FSDP: its parameters are flat pieces, so train without it", trainer.is_fsdp_enabled
    yield "of a PEFT adapter: merge it into the model, or train all weights", hasattr(trainer.model, "peft_config")
    yield "with images: give a text model and its tokenizer", trainer._is_vlm  # noqa: SLF001 (TRL says it nowhere else)
    has_tools = bool(trainer.tools) or trainer.environment_factories is not None
    yield "with tools or environments: leave them out, or call tools in a rollout_func of your own", has_tools


def _sampling(trainer: Any) -> tensorhub.Sampling:  # noqa: ANN401 (as above)
    return tensorhub.Sampling(
        max_tokens=trainer.max_completion_length,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k or 0,
        stop_token_ids=tuple(trainer.eos_token_ids),
        seed=trainer.args.seed,
    )


def _weights_of(trainer: Any) -> "dict[str, torch.Tensor]":  # noqa: ANN401 (as above)
    """Return parameters and buffers, tied ones once, as `register` takes them from the same module in an engine."""
    module = trainer.accelerator.unwrap_model(trainer.model)
    return {name: each.detach() for name, each in chain(module.named_parameters(), module.named_buffers())}


def _each_once(prompts: list[Any], size: int) -> list[Any]:
    """Return one prompt of each group."""
    groups = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    if any(len(group) != size or any(each != group[0] for each in group) for group in groups):
        raise TensorHubError(f"TRL's prompts don't come {size} times in a row each, as this release of TRL gives them")
    return [group[0] for group in groups]


def _tokenised(prompts: list[Any], trainer: Any) -> list[list[int]]:  # noqa: ANN401 (as above)
    """Return the prompts as the trainer tokenises them when it generates by itself, with its chat template."""
    ids, images, _ = trainer._tokenize_prompts(prompts)  # noqa: SLF001 (its own way, so that both are the same)
    if images is not None:
        raise NotInThisVersion("a prompt has an image, which runners can't take: leave it out")
    return [list(each) for each in ids]
