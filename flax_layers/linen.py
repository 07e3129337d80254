"""The layers as linen modules, through `flax.nnx.bridge`.

    from flax import linen as nn
    from flax_layers import linen as layers

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = layers.LlamaBlock(in_features=512, hidden_features=1408, num_heads=8, dtype=jnp.bfloat16)(x)
            return layers.RMSNorm(num_features=512)(x)

Arguments are those of the nnx module, all by keyword, without `rngs`; parameters have its names and shapes, so
`nnx.update(module, nn.meta.unbox(variables["params"]))` gives them to the nnx module, whose `generate` reads them
there. What the modules take and return is the same too. Other methods of the nnx module are called by name:
`model.apply(variables, tokens, labels, nnx_method="loss")`.

Variables have the names of their axes as flax's logical partitioning wants them (`flax_layers.axis_metadata`), and are
used as arrays otherwise: `nn.get_partition_spec` gives the names, also of what nn.scan stacks along any axis, and
`nn.meta.unbox` plain arrays, which `apply` takes as well. A checkpoint that orbax wrote of plain arrays needs a target
of plain arrays, `nn.meta.unbox(jax.eval_shape(model.init, key, tokens))`. `metadata_fn=nnx.Variable.get_value` of a
module makes plain ones.

Sharding rules are the nnx module's too, `layers.Llama(config=config, rules=sharding.FSDP)`, and
`sharding.parameter_shardings(jax.eval_shape(model.init, key, tokens), mesh, rules)` is what `jax.jit(model.init,
out_shardings=...)` makes variables by. `init`, `apply`, `nn.compact`, `nn.scan` and `nn.remat` work as with any linen
module. The blocks of a `Llama` are numbered by integers, as in nnx.List: {"layers": {0: ..., 1: ...}}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
from flax.nnx.bridge.wrappers import ToLinen, to_linen_class

import flax_layers

__all__ = ["Attention", "GatedMLP", "LMHead", "Linear", "Llama", "LlamaBlock", "RMSNorm"]


class _ByKeyword:
    """Refuses positional arguments: the first two of them would be ToLinen's `args` and `kwargs`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        init: Callable[..., None] = cls.__init__  # ToLinen's, made anew for every subclass

        def by_keyword(self: Any, *positional: Any, **keywords: Any) -> None:
            if positional:
                values = ", ".join(map(repr, positional))
                raise TypeError(f"{type(self).__name__} takes its arguments by keyword, got {values}")
            init(self, **keywords)

        cls.__init__ = by_keyword  # type: ignore[method-assign]


def _adapter(module: type[nnx.Module]) -> type[ToLinen]:
    name = module.__name__
    namespace = {"__module__": __name__, "__qualname__": name, "__doc__": f"`flax_layers.{name}` in linen."}
    return type(name, (_ByKeyword, to_linen_class(module)), namespace)


Attention = _adapter(flax_layers.Attention)
GatedMLP = _adapter(flax_layers.GatedMLP)
LMHead = _adapter(flax_layers.LMHead)
Linear = _adapter(flax_layers.Linear)
Llama = _adapter(flax_layers.Llama)
RMSNorm = _adapter(flax_layers.RMSNorm)
LlamaBlock = _adapter(flax_layers.LlamaBlock)
