"""The experts that a token goes to, and their weights.

    logits = x @ kernel [+ logit_bias]             float32
    scores = softmax(logits) or sigmoid(logits)
    experts = the k largest of scores + bias       among the chosen groups of experts, where there are groups
    weights = scaling * scores[experts] [/ sum of scores[experts]]

Mixtral and Qwen3-MoE have softmax (Mixtral always with the division), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)
sigmoid, the division, a bias and groups. gpt-oss has softmax, the division, and logits with a bias that is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from flax_layers.axis_metadata import parameter
from flax_layers.linear import default_kernel_init
from flax_layers.moe.router_product import router_logits
from flax_layers.remat import ROUTING, named

Scoring = Literal["softmax", "sigmoid"]
_LEAST_SUM = 1e-20  # DeepSeek-V3's, beside scores that may all be 0

T = TypeVar("T", bound=nnx.Module | nnx.State)


class BalanceBias(nnx.Variable[Any]):
    """The bias that is added to each expert's score for the choice alone, (E,) float32; no parameter.

    `update_balance_bias` changes it from counts, outside of the gradient. `nnx.state(model)` has it, and so has a
    checkpoint of that; layers stacked for a scan have (L, E).
    """


class Routing(NamedTuple):
    """The decision of a router about tokens (...).

    Attributes:
      ids: (..., k) int32, the experts of each token, the best first.
      weights: (..., k) float32.
      logits: (..., E) float32.
      probabilities: (..., E) float32: the scores, which sum to 1 over the experts; sigmoids are divided by their sum.
    """

    ids: jax.Array
    weights: jax.Array
    logits: jax.Array
    probabilities: jax.Array


def route(
    logits: jax.Array,
    k: int,
    *,
    bias: jax.Array | None = None,
    scoring: Scoring = "softmax",
    normalized: bool = True,
    scaling: float = 1.0,
    groups: int | None = None,
    groups_kept: int | None = None,
) -> Routing:
    """The choice and the weights of `Router`, from logits (..., E) float32 and a bias (E,) float32."""
    scores = jax.nn.softmax(logits, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(logits)
    eligible = lax.stop_gradient(scores if bias is None else scores + bias)
    if groups is not None and groups_kept is not None:
        eligible = _within_best_groups(eligible, groups, groups_kept)
    ids = named(lax.top_k(eligible, k)[1].astype(jnp.int32), ROUTING)
    weights = _chosen(scores, ids)
    if normalized:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (total if scoring == "softmax" else total + _LEAST_SUM)
    if scaling != 1:
        weights = weights * scaling
    probabilities = scores
    if scoring == "sigmoid":
        probabilities = scores / (jnp.sum(scores, axis=-1, keepdims=True) + _LEAST_SUM)
    return Routing(ids, weights, logits, probabilities)


def _chosen(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """scores[..., ids[..., j]], (..., k), by comparison: a gather's gradient would be a scatter with additions."""
    is_chosen = ids[..., None] == jnp.arange(scores.shape[-1], dtype=ids.dtype)
    return jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0), axis=-1)


def _within_best_groups(scores: jax.Array, groups: int, kept: int) -> jax.Array:
    """The scores, -inf outside of the groups of experts with the largest sums of their two best scores."""
    grouped_scores = scores.reshape(*scores.shape[:-1], groups, scores.shape[-1] // groups)
    group_scores = jnp.sum(lax.top_k(grouped_scores, 2)[0], axis=-1)
    best = lax.top_k(group_scores, kept)[1]
    is_kept = jnp.any(best[..., None] == jnp.arange(groups, dtype=best.dtype), axis=-2)
    return jnp.where(is_kept[..., None], grouped_scores, -jnp.inf).reshape(scores.shape)


class Router(nnx.Module):
    """Chooses k of E experts for each token.

    Logits, scores and weights are float32, whatever the dtypes of x and of the kernel: see `router_product`.

    Args:
      in_features: D.
      num_experts: E.
      experts_per_token: k.
      scoring: "softmax" over the experts, or "sigmoid" of each.
      normalized: whether a token's weights are divided by their sum.
      scaling: a factor of the weights.
      groups, groups_kept: the experts form this number of equal groups, consecutive ones in each; only those of the
        groups_kept best groups can be chosen. A group's score is the sum of its two best.
      use_bias: whether there is a BalanceBias, at first 0.
      use_logit_bias: whether logits have a bias that is trained, the parameter `logit_bias` (E,), at first 0.
      param_dtype: storage dtype of `kernel` (D, E) and of `logit_bias`.
      kernel_init: initialiser of `kernel`.
      rngs: source of keys.

    Raises:
      ValueError: more experts for a token than there are, groups that do not fit, or an unknown scoring.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        experts_per_token: int,
        *,
        scoring: Scoring = "softmax",
        normalized: bool = True,
        scaling: float = 1.0,
        groups: int | None = None,
        groups_kept: int | None = None,
        use_bias: bool = False,
        use_logit_bias: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        check_router(num_experts, experts_per_token, scoring, groups, groups_kept)
        self.kernel = parameter(kernel_init(rngs.params(), (in_features, num_experts), param_dtype), "embed", None)
        self.bias = BalanceBias(jnp.zeros((num_experts,), jnp.float32)) if use_bias else nnx.data(None)
        self.logit_bias: Any = nnx.data(None)
        if use_logit_bias:
            self.logit_bias = parameter(jnp.zeros((num_experts,), param_dtype), None)
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.scoring, self.normalized, self.scaling = scoring, normalized, scaling
        self.groups, self.groups_kept = groups, groups_kept

    def __call__(self, x: jax.Array) -> Routing:
        """Routes x (..., D)."""
        logits = router_logits(x, self.kernel[...])
        if self.logit_bias is not None:
            logits = logits + self.logit_bias[...].astype(logits.dtype)
        return route(
            logits,
            self.experts_per_token,
            bias=None if self.bias is None else lax.stop_gradient(self.bias[...]),
            scoring=self.scoring,
            normalized=self.normalized,
            scaling=self.scaling,
            groups=self.groups,
            groups_kept=self.groups_kept,
        )


def check_router(
    num_experts: int, experts_per_token: int, scoring: str, groups: int | None, groups_kept: int | None
) -> None:
    """Checks a router's arguments.

    Raises:
      ValueError: counts that are no positive integers, more experts of a token than there are, groups that do not fit,
        or an unknown scoring.
    """
    counts = {"num_experts": num_experts, "experts_per_token": experts_per_token}
    if wrong := [name for name, n in counts.items() if not isinstance(n, int | np.integer) or n < 1]:
        raise ValueError(f"{wrong[0]}={counts[wrong[0]]!r}; it must be an integer, 1 or more")
    if experts_per_token > num_experts:
        raise ValueError(
            f"experts_per_token (of a MoEConfig num_experts_per_tok) is {experts_per_token}, of num_experts="
            f"{num_experts}; it must be 1 to {num_experts}"
        )
    if scoring not in get_args(Scoring):
        raise ValueError(f"{scoring=} is unknown; it must be one of {', '.join(get_args(Scoring))}")
    if groups is None and groups_kept is None:
        return
    if groups is None or groups_kept is None:
        raise ValueError(
            f"{groups} groups of experts of which {groups_kept} are kept; give both numbers (groups and groups_kept, "
            "of a MoEConfig n_group and topk_group) or none"
        )
    if groups < 1 or num_experts % groups or num_experts // groups < 2:
        raise ValueError(f"{num_experts} experts do not make {groups} equal groups of two or more")
    if not 1 <= groups_kept <= groups:
        raise ValueError(f"{groups_kept} of {groups} groups are kept; it must be 1 to {groups}")
    if experts_per_token > groups_kept * (num_experts // groups):
        raise ValueError(
            f"{experts_per_token} experts a token are more than {groups_kept} groups of {num_experts // groups} have"
        )


def update_balance_bias(model: T, counts: jax.Array, rate: float) -> T:
    """Adds rate * sign(mean of counts - counts) to the balance biases: experts with too many tokens get fewer.

    DeepSeek-V3's load balancing without an auxiliary loss (arXiv 2408.15664). Called after the step, outside of the
    gradient. Counts are those of the entire step: `model.loss(..., tokens_per_expert=True)` under `jax.jit` counts the
    tokens of all devices, and those of microbatches are added up.

    Args:
      model: a module, or a state with its structure, that has `BalanceBias`es; they are changed in place.
      counts: (L, E), one row for each layer with experts, in order, as `loss` returns it; or (E,) of one router.
      rate: DeepSeek-V3's is 0.001.

    Returns:
      model.

    Raises:
      ValueError: no balance bias, or counts of another shape.
    """
    biases = list(_balance_biases(model))
    sizes = [bias[...].shape[0] if bias[...].ndim > 1 else 1 for bias in biases]
    if not biases:
        raise ValueError("update_balance_bias: there is no BalanceBias: give MoE or MoEConfig use_balance_bias=True")
    rows = counts if counts.ndim > 1 else counts[None]
    experts = biases[0][...].shape[-1]
    if rows.shape != (sum(sizes), experts):
        raise ValueError(
            f"update_balance_bias: counts have shape {counts.shape}; {sum(sizes)} layers of {experts} experts with a "
            f"bias want ({sum(sizes)}, {experts})"
        )
    wide = rows.astype(jnp.float32)
    steps = rate * jnp.sign(jnp.mean(wide, axis=-1, keepdims=True) - wide)
    first = 0
    for bias, size in zip(biases, sizes, strict=True):
        bias[...] = bias[...] + steps[first : first + size].reshape(bias[...].shape)
        first += size
    return model


def _balance_biases(model: nnx.Module | nnx.State) -> Iterator[BalanceBias]:
    """The balance biases in the order of the layers."""
    state = nnx.state(model, BalanceBias) if isinstance(model, nnx.Module) else nnx.filter_state(model, BalanceBias)
    for _, variable in nnx.to_flat_state(state):
        yield variable
