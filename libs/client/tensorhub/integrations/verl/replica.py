"""verl's `RolloutReplica` without an engine: one `RolloutServer`, behind which the job's runners generate.

Runners are no part of verl's cluster: they come, go and are killed while the job goes on, and verl notices nothing.
"""

from typing import Any, Final

import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from tensorhub import NotInThisVersion, Sampling, TensorHubError
from tensorhub.integrations.verl.checkpoint_engine import BACKEND
from tensorhub.integrations.verl.rollout_server import RolloutServer, ServerSettings

SETTINGS: Final = ("name", "staleness", "on_update", "wait_s")
"""What `engine_kwargs.tensorhub` of verl's rollout configuration may have."""
OF_WEIGHTS: Final = {"model": "policy", "job": None, "agent": None, "timeout_s": 600}
"""What a server takes from the checkpoint engine's settings, with what holds without them."""


class TensorHubReplica(RolloutReplica):
    """One server for verl's clients. Several share the same runners, and spread what passes through one process."""

    async def init_hybrid(self, worker_group: Any) -> None:  # noqa: ANN401, ARG002 (verl's signature; runners have the weights)
        """Start the server. The actor's workers have no engine beside them."""
        await self._init(RolloutMode.HYBRID)

    async def init_hybrid_colocated(self, worker_group: Any, resource_pool: Any) -> None:  # noqa: ANN401, ARG002 (as above)
        """Start the server, as `init_hybrid`."""
        await self._init(RolloutMode.HYBRID)

    async def init_colocated(self, resource_pool: Any) -> None:  # noqa: ANN401, ARG002 (as above)
        """Start the server. It takes nothing of the pool."""
        await self._init(RolloutMode.COLOCATED)

    async def init_standalone(self) -> None:
        """Start the server. No pool is made: no GPU of verl's cluster generates."""
        await self._init(RolloutMode.STANDALONE)

    async def _init(self, mode: RolloutMode) -> None:
        self.rollout_mode = mode
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the server and wait until it is attached.

        Raises:
            NotInThisVersion: The configuration asks for what runners can't follow.
            TensorHubError: No hub or no rollout manager is there.
        """
        server = (
            ray.remote(RolloutServer)
            .options(num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(self._server_settings())
        )
        await server.start.remote()
        self.servers = self.workers = [server]
        self._server_handle = server
        # verl tells servers apart by this; nothing is served there.
        self._server_address = f"{BACKEND}-{self.replica_rank}"

    def _server_settings(self) -> ServerSettings:
        config, weights = self.config, self.config.checkpoint_engine
        # verl's trainers give it as it stands in their files.
        model = omega_conf_to_dataclass(self.model_config, HFModelConfig)
        for what, is_asked in (
            (f"without checkpoint_engine.backend={BACKEND}, by which runners get weights", weights.backend != BACKEND),
            ("as a reward model: it has weights of its own", self.is_reward_model),
            ("as a teacher: it has weights of its own", self.is_teacher_model),
            ("with full_determinism: tokens depend on the order of requests", config.full_determinism),
            ("with ignore_eos", config.ignore_eos),
            ("with LoRA: merge it (model.lora.merge=True)", _has_unmerged_lora(model)),
            ("with enable_rollout_routing_replay", config.enable_rollout_routing_replay),
        ):
            if is_asked:
                raise NotInThisVersion(f"rollout.name={BACKEND} can't generate {what}")
        given = dict(config.engine_kwargs.get(BACKEND) or {})
        unknown = [each for each in given if each not in SETTINGS]
        if unknown:
            raise TensorHubError(f"rollout.engine_kwargs.{BACKEND} has no {unknown[0]!r}: take {', '.join(SETTINGS)}")
        hub = {**OF_WEIGHTS, **(weights.engine_kwargs.get(BACKEND) or {})}
        name = f"{given.pop('name', 'verl')}{self.name_suffix}-{self.replica_rank}"
        sampling = Sampling(
            max_tokens=config.response_length,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=max(0, config.top_k),
            stop_token_ids=_ends_of(model),
            seed=config.seed,
        )
        return ServerSettings(
            hub["model"],
            hub["job"],
            hub["agent"],
            name,
            sampling,
            config.prompt_length,
            update_s=hub["timeout_s"],
            **given,
        )

    # ------------------------------------------------------------------- what an engine on verl's GPUs would do

    async def wake_up(self) -> None:
        """Do nothing: runners are awake while the trainer trains."""

    async def sleep(self) -> None:
        """Do nothing: what is under way goes on."""

    async def clear_kv_cache(self) -> None:
        """Do nothing: a runner's cache belongs to one version."""

    async def release_kv_cache(self) -> None:
        """Do nothing: a runner has memory of its own."""

    async def resume_kv_cache(self) -> None:
        """Do nothing."""

    async def start_profile(self, **kwargs: Any) -> None:  # noqa: ANN401 (as above)
        """Do nothing: a response's spans say where its time goes."""

    async def stop_profile(self) -> None:
        """Do nothing."""


class NoEngine(BaseRollout):
    """The engine's place in verl's fused workers. It is empty: runners elsewhere have the engine."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing."""

    async def release(self) -> None:
        """Do nothing."""

    async def update_weights(self, weights: Any, **_: Any) -> None:  # noqa: ANN401, ARG002 (verl's signature)
        """Refuse weights that come past the hub."""
        raise NotInThisVersion(f"rollout.name={BACKEND} takes no weights here: set checkpoint_engine.backend={BACKEND}")


def _has_unmerged_lora(model: Any) -> bool:  # noqa: ANN401 (verl has no types here)
    rank = model.lora.get("rank", 0) or model.lora_rank
    return bool(rank) and not model.lora.get("merge", False)


def _ends_of(model: Any) -> tuple[int, ...]:  # noqa: ANN401 (as above)
    """Return the tokens that end a response, as engines find them in a model's directory."""
    found: list[int] = []
    for source in (model.generation_config, model.hf_config):
        ends = getattr(source, "eos_token_id", None)
        found += [ends] if isinstance(ends, int) else (ends or [])
    return tuple(dict.fromkeys(found))
