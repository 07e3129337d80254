"""The training run's jitted functions: a step, a validation loss, a sample."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import device_mesh
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stdlib_text
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_layers import Llama, LlamaConfig
from flax_layers.decoding import generate
from flax_layers.muon import muon, muon_dimension_numbers


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that the result of a run depends on; a run is resumed only with the same ones, on any mesh."""

    steps: int
    batch: int
    context: int
    width: int
    layers: int
    heads: int
    dtype: str
    learning_rate: float
    seed: int
    accumulate: int = 1
    clip: float = 0.0
    separate_qkv: bool = False


class Trainer:
    """The compiled functions of a run. A state is {"params", "opt", "step"}; step is also the position in the data.

    step(state, text) -> (state, loss) is step_function compiled; it gives the state's buffers away.

    Args:
      settings: of the run.
      train: the text, uint8, the same in every process.
      mesh: of all devices; None for one device. The state is made where it is to lie, and stays there. Each device
        cuts its own windows out of the text, so that no process makes those of another.
    """

    def __init__(self, settings: Settings, train: np.ndarray, mesh: Mesh | None = None):
        self.settings, self.mesh = settings, mesh
        self._config = LlamaConfig(
            vocab_size=stdlib_text.VOCAB_SIZE,
            hidden_size=settings.width,
            intermediate_size=-(-settings.width * 8 // 3 // 64) * 64,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.context,
        )
        self.graphdef = nnx.split(nnx.eval_shape(self._model), nnx.Param)[0]
        self.optimizer = make_optimizer(settings)
        abstract = jax.eval_shape(self._initial_state)
        self._shardings = device_mesh.state_shardings(abstract, mesh)
        self.abstract_state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, self._shardings
        )
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self.text = jnp.asarray(train) if everywhere is None else device_mesh.put(train, everywhere)
        self.loss = jax.jit(self._loss, out_shardings=everywhere)
        out = None if mesh is None else (self._shardings, everywhere)
        with self.on_mesh():
            step = jax.jit(self.step_function, donate_argnums=0, out_shardings=out)
            self.step = step.lower(self.abstract_state, self.text).compile()

    def initial_state(self) -> dict[str, Any]:
        if self.mesh is None:
            return self._initial_state()
        with self.on_mesh():
            state: dict[str, Any] = jax.jit(self._initial_state, out_shardings=self._shardings)()
        return state

    @property
    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.abstract_state["params"]))

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _model(self) -> Llama:
        settings = self.settings
        return Llama(
            self._config,
            separate_qkv=settings.separate_qkv,
            rules=None if self.mesh is None else device_mesh.RULES,
            dtype=jnp.dtype(settings.dtype),
            rngs=nnx.Rngs(settings.seed),
        )

    def _initial_state(self) -> dict[str, Any]:
        params = nnx.state(self._model(), nnx.Param)
        return {"params": params, "opt": self.optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    def _loss(self, params: nnx.State, windows: jax.Array) -> jax.Array:
        """Mean over windows (B, T + 1) of -log2 p(next byte)."""
        windows = windows.astype(jnp.int32)
        return nnx.merge(self.graphdef, params).loss(windows[:, :-1], windows[:, 1:]) / jnp.log(2.0)

    def _loss_and_gradient(self, params: nnx.State, text: jax.Array, starts: jax.Array) -> tuple[jax.Array, nnx.State]:
        """The loss and the gradient of the windows that begin at `starts` (B,)."""
        windows = text[starts[:, None] + jnp.arange(self.settings.context + 1)]
        if self.mesh is not None:
            windows = jax.lax.with_sharding_constraint(windows, device_mesh.batch_sharding(self.mesh, len(windows)))
        loss, gradient = jax.value_and_grad(self._loss)(params, windows)
        return loss, self._as_parameters(gradient)

    def _as_parameters(self, gradient: nnx.State) -> nnx.State:
        """The gradient, sharded as the parameters are: under FSDP sums over devices are then scattered."""
        if self.mesh is None:
            return gradient
        return jax.lax.with_sharding_constraint(gradient, self._shardings["params"])

    def step_function(self, state: dict[str, Any], text: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        settings, params = self.settings, state["params"]
        # The step decides the data, so a resumed run sees what an uninterrupted one would have.
        key = jax.random.fold_in(jax.random.key(settings.seed), state["step"])
        starts = jax.random.randint(key, (settings.batch,), 0, text.size - settings.context)
        if settings.accumulate == 1:
            loss, gradient = self._loss_and_gradient(params, text, starts)
        else:

            def add(sums: Any, starts: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, sums, self._loss_and_gradient(params, text, starts)), None

            zeros = jnp.zeros(()), self._as_parameters(jax.tree.map(jnp.zeros_like, params))
            sums, _ = jax.lax.scan(add, zeros, starts.reshape(settings.accumulate, -1))
            loss, gradient = jax.tree.map(lambda x: x / settings.accumulate, sums)
        updates, opt = self.optimizer.update(gradient, state["opt"], params)
        return {"params": optax.apply_updates(params, updates), "opt": opt, "step": state["step"] + 1}, loss

    def validate(self, params: nnx.State, windows: np.ndarray) -> float:
        """Mean bits per byte over windows (W, T + 1)."""
        batch = min(len(windows), max(1, 2**13 // self.settings.context))
        count = len(windows) // batch * batch
        with self.on_mesh():
            losses = [self.loss(params, self._placed(windows[i : i + batch])) for i in range(0, count, batch)]
        return mean(losses)

    def _placed(self, windows: np.ndarray) -> jax.Array:
        if self.mesh is None:
            return jnp.asarray(windows)
        return device_mesh.put(windows, device_mesh.batch_sharding(self.mesh, len(windows)))

    def sample(self, params: nnx.State, prompt: bytes, length: int, temperature: float = 0.8) -> bytes:
        """The prompt continued by length sampled bytes, fewer where the context ends, ended by a file's end."""
        context = self.settings.context
        tokens = np.frombuffer(prompt, np.uint8)[None, -max(1, context // 2) :].astype(np.int32)
        with self.on_mesh():
            made, lengths = map(
                device_mesh.fetch,
                generate(
                    nnx.merge(self.graphdef, params),
                    tokens,
                    max_new_tokens=min(length, context + 1 - tokens.shape[1]),
                    temperature=temperature,
                    eos_token=stdlib_text.SEPARATOR,
                    key=jax.random.key(self.settings.seed),
                ),
            )
        return prompt + made[0, : int(lengths[0])].astype(np.uint8).tobytes().rstrip(b"\0")


def mean(losses: list[jax.Array]) -> float:
    return float(np.mean([float(loss) for loss in losses]))


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Muon for the matrices inside the blocks, AdamW for embedding, head and norms; warm-up, then cosine decay.

    Before that the gradient is scaled down to a norm of at most settings.clip, if that is not 0.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, min(50, settings.steps // 10), settings.steps, 0.0
    )
    transformation = muon(
        schedule,
        adam_learning_rate=schedule,
        adam_b2=0.95,
        weight_decay=0.1,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=muon_dimension_numbers,
        precision="bfloat16" if jax.default_backend() == "gpu" else "float32",  # CPUs multiply bfloat16 more slowly
    )
    return optax.chain(optax.clip_by_global_norm(settings.clip), transformation) if settings.clip else transformation
