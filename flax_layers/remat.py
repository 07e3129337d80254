"""The arrays that a layer keeps for its backward pass, where others are recomputed: policies for `jax.checkpoint`.

Policies of JAX hold as for plain JAX: `jax.checkpoint_policies.dots_saveable` keeps every product. The policies here go
by MaxText's names, which a pre-norm block gives to these arrays (D model width, F hidden features, H query and Hkv key
heads of width Dh; bytes a token and layer where stream and compute dtype have 2 bytes):

| name                              | array                                          | bytes              |
|-----------------------------------|------------------------------------------------|--------------------|
| decoder_layer_input               | the residual stream that enters                | 2 D                |
| query_proj, key_proj, value_proj  | as attention reads them, rotated               | 2 (H + 2 Hkv) Dh   |
| context                           | what attention returns, its log-sum-exp        | 2 H Dh + 4 H       |
| out_proj                          | the residual stream after attention, row sums  | 2 D + 4            |
| expert_rows                       | rows of tokens, sorted by their k experts      | 2 k D              |
| mlpwi                             | gate and up before the activation (k experts)  | 4 F (4 k F)        |
| mlpwo                             | the residual stream that leaves                | 2 D, next's        |

decoder_layer_input is kept by every policy, as the argument of what is checkpointed. So is what a router chose: each
token's k experts and the order of rows by expert, 12 k bytes. If they were recomputed, scores that differ in the last
bit could choose another expert, whose gradient would be wrong. Expert rows are the largest array of a layer with
experts: a tuple of all names but theirs gathers them again, and runs no product again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from coda_jax.extend import CONTEXT_NAME

Remat = str | Iterable[str] | Callable[..., Any] | None

ROUTING = "routing"  # kept by every policy
EXPERT_ROWS = "expert_rows"
LAYER_INPUT, ATTENTION_OUTPUT, LAYER_OUTPUT = "decoder_layer_input", "out_proj", "mlpwo"
CONTEXT = CONTEXT_NAME  # `coda.attention` gives it to its result and log-sum-exp
QKV = ("query_proj", "key_proj", "value_proj")
NAMES = frozenset({LAYER_INPUT, *QKV, CONTEXT, ATTENTION_OUTPUT, EXPERT_ROWS, "mlpwi", LAYER_OUTPUT})
# MaxText's names for arrays that are several here, or pieces of one.
_ALSO = {"qkv_proj": QKV, "attention_out": (CONTEXT,), "mlpwi_0": ("mlpwi",), "mlpwi_1": ("mlpwi",)}

POLICIES: dict[str, tuple[str, ...]] = {
    # Keeps 2 D; runs the forward pass again but for the last product: 3 products and attention.
    "full": (),
    # Keeps 2 D + 2 (H + 2 Hkv) Dh; runs attention and 2 products again.
    "save_qkv": QKV,
    # Keeps 4 D + 2 (2 H + 2 Hkv) Dh + 4 H + 4; runs one product again, the one that makes gate and up, which is most
    # of what a layer keeps without a policy.
    "save_attention": (*QKV, CONTEXT, ATTENTION_OUTPUT),
}


def named(x: jax.Array, name: str) -> jax.Array:
    """x, named for policies."""
    result: jax.Array = checkpoint_name(x, name)
    return result


def names_of(remat: str | Iterable[str]) -> frozenset[str]:
    """The names of the arrays that are kept.

    Args:
      remat: a key of `POLICIES`; or names, of `NAMES` or MaxText's.

    Raises:
      ValueError: an unknown policy or name.
    """
    if isinstance(remat, str):
        if remat not in POLICIES:
            raise ValueError(
                f"{remat=} is not a policy: {', '.join(POLICIES)}. Names of arrays to keep are given as a tuple."
            )
        return frozenset(POLICIES[remat])
    if not isinstance(remat, Iterable):
        raise ValueError(f"{remat=}; it must be None, one of {', '.join(POLICIES)}, names of arrays, or a policy")
    requested = tuple(remat)
    names = frozenset(name for one in requested for name in _ALSO.get(one, (one,)))
    if unknown := sorted(names - NAMES):
        raise ValueError(f"remat={requested!r}: no array is named {unknown[0]!r}; names are {', '.join(sorted(NAMES))}")
    return names


def policy_of(remat: Remat) -> Callable[..., Any] | None:
    """The policy for `jax.checkpoint` that `remat` stands for; None where nothing is recomputed.

    Args:
      remat: None; a key of `POLICIES`; names of the arrays to keep, of `NAMES` or MaxText's; or a policy itself.

    Raises:
      ValueError: an unknown policy or name.
    """
    if remat is None or callable(remat):
        return remat
    names = names_of(remat)
    by_name = jax.checkpoint_policies.save_only_these_names(*names, ROUTING)
    if CONTEXT not in names:
        return by_name

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        # cuDNN's backward pass also needs the forward pass's log-sum-exp, which no name outside of it can reach.
        return primitive.name.startswith("dot_product_attention_fwd") or by_name(primitive, *avals, **params)

    return policy
