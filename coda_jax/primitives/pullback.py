"""The derivative of an epilogue, and the arrays that are kept for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from coda_jax.epilogue import Epilogue, TileStore, types_of
from coda_jax.epilogue.contraction_order import contraction_order_p
from coda_jax.epilogue.user_code import default_types


@dataclasses.dataclass(frozen=True)
class Pullback:
    """The derivative of an epilogue with respect to acc and its floating arguments, as one jaxpr without dead code.

    Attributes:
      name: of the epilogue.
      jaxpr: (acc, arguments, cotangents: the needed ones) -> (dacc, cotangents of the floating arguments), all as f
        sees them.
      needs_acc: whether it reads acc; it does not where f is linear in it.
      needs: for each argument (operands, then captured arrays) whether it reads it.
      dtypes: stored dtype of each argument.
      floating_outputs: which flat outputs have a cotangent that is not zeros; `reads_cotangent` says which of these it
        reads.
      row_axes: for each flat output the axes that the rows index.
      reordered: by the number of the flat output, tiles whose elements are stored in another order.
    """

    name: str
    jaxpr: jex_core.ClosedJaxpr
    needs_acc: bool
    needs: tuple[bool, ...]
    dtypes: tuple[np.dtype, ...]
    floating_outputs: tuple[int, ...]
    reads_cotangent: tuple[bool, ...]
    row_axes: tuple[tuple[int, ...], ...]
    reordered: Mapping[int, TileStore]

    @classmethod
    def of(
        cls, epilogue: Epilogue, acc: Any, arguments: Sequence[Any], absent: frozenset[int] = frozenset()
    ) -> Pullback:
        """Differentiates `epilogue` at the types of `acc` and of its arguments.

        Args:
          absent: numbers of the outputs whose cotangents are zeros, and so are not read.
        """
        operands = epilogue.program.operands

        def as_traced(*arguments: jax.Array) -> list[jax.Array]:
            return [x.astype(operand.traced_dtype) for x, operand in zip(arguments, operands, strict=True)]

        typed = types_of(as_traced, *arguments)
        outputs = types_of(epilogue.call, acc, *typed)
        floating_outputs = [i for i, x in enumerate(outputs) if _is_floating(x.dtype) and i not in absent]
        floating = [i for i, x in enumerate(typed) if _is_floating(x.dtype)]

        def pull(acc: jax.Array, arguments: list[jax.Array], cotangents: list[jax.Array]) -> tuple[jax.Array, ...]:
            def function(acc: jax.Array, *varied: jax.Array) -> list[jax.Array]:
                varied_by_index = dict(zip(floating, varied, strict=True))
                outputs = epilogue.call(acc, *(varied_by_index.get(i, x) for i, x in enumerate(arguments)))
                return [outputs[i] for i in floating_outputs]

            _, vjp = jax.vjp(function, acc, *(arguments[i] for i in floating))
            return vjp(cotangents)

        with default_types():
            closed = jax.make_jaxpr(pull)(acc, typed, [outputs[i] for i in floating_outputs])
        live, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        needs, reads = used[1 : 1 + len(typed)], used[1 + len(typed) :]
        return cls(
            epilogue.name,
            jex_core.ClosedJaxpr(live, closed.consts),
            used[0],
            tuple(needs),
            tuple(operand.dtype for operand in operands),
            tuple(floating_outputs),
            tuple(reads),
            epilogue.program.row_axes,
            {x.output: x for x in epilogue.program.stores if x.transposed or x.contraction_order},
        )

    @property
    def is_uniform(self) -> bool:
        """True if all arrays vary over the same manual mesh axes; else it sums over axes, which no epilogue can do."""
        return len({aval.manual_axis_type.varying for aval in self.jaxpr.in_avals}) <= 1

    def needed(self, full: Pullback, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The arguments that it reads, from those that `full`, the derivative with all cotangents, reads."""
        each = zip(arguments, (needs for needs, kept in zip(self.needs, full.needs, strict=True) if kept), strict=True)
        return [x for x, needs in each if needs]

    def __call__(
        self, acc: jax.Array | None, arguments: Sequence[jax.Array], cotangents: Sequence[Any]
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        """dacc float32 and each argument's cotangent (None for integers), from the needed arrays and all cotangents."""
        dacc, *rest = self._run(acc, arguments, [cotangents[i] for i in self._read])
        return dacc, self.restored(rest)

    def _run(
        self, acc: jax.Array | None, arguments: Sequence[jax.Array], cotangents: Sequence[jax.Array]
    ) -> list[jax.Array]:
        inputs = [*arguments, *cotangents]
        if self.needs_acc:
            assert acc is not None
            inputs = [acc, *inputs]
        typed = (x.astype(aval.dtype) for x, aval in zip(inputs, self.jaxpr.in_avals, strict=True))
        return jex_core.jaxpr_as_fun(self.jaxpr)(*typed)

    def restored(self, cotangents: Sequence[jax.Array]) -> list[jax.Array | None]:
        """Cotangents of all arguments in their stored dtypes and shapes, from those of the floating ones."""
        rest = iter(cotangents)
        return [next(rest).astype(dtype) if _is_floating(dtype) else None for dtype in self.dtypes]

    def as_operands(self, cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        """The cotangents that are read, in shapes that broadcast against acc: (M,) as (M, 1), (N, M) as (M, N)."""
        chosen = ((i, cotangents[i]) for i in self._read)
        return [x[:, None] if self._is_column(i, x) else self._in_order_of_acc(i, x) for i, x in chosen]

    @property
    def _read(self) -> list[int]:
        """The numbers of the outputs whose cotangents are read."""
        return [i for i, reads in zip(self.floating_outputs, self.reads_cotangent, strict=True) if reads]

    def _in_order_of_acc(self, output: int, x: jax.Array) -> jax.Array:
        store = self.reordered.get(output)
        if store is not None and store.contraction_order:
            x = contraction_order_p.bind(x, axis=1, back=True)
        return x.T if store is not None and store.transposed else x

    def _in_order_of_output(self, output: int, x: jax.Array, shape: Sequence[Any]) -> jax.Array:
        """Undoes `as_operands` for one output."""
        store = self.reordered.get(output)
        if store is None:
            return x.reshape(shape)
        x = x.T if store.transposed else x
        return contraction_order_p.bind(x, axis=1, back=False) if store.contraction_order else x

    def _is_column(self, output: int, x: jax.Array) -> bool:
        return self.row_axes[output] == (0,) and x.ndim == 1

    def as_epilogue(self) -> Callable[..., list[jax.Array]]:
        """The derivative as an epilogue of `as_operands`' shapes."""
        shapes = [t.shape for t in self.jaxpr.in_avals[1:]]

        def derivative(acc: jax.Array, *operands: jax.Array) -> list[jax.Array]:
            first = len(shapes) - len(self._read)  # of the cotangents
            arguments = [x.reshape(shape) for x, shape in zip(operands[:first], shapes[:first], strict=True)]
            each_output = zip(self._read, operands[first:], shapes[first:], strict=True)
            return self._run(acc, arguments, [self._in_order_of_output(*one) for one in each_output])

        derivative.__name__ = self.name
        return derivative

    def out_dtypes(self, epilogue: Epilogue, dacc: np.dtype) -> list[np.dtype]:
        """The dtypes of its outputs: of a tile that of the array whose cotangent it is, of others the epilogue's."""
        tiles = {store.output for store in epilogue.program.stores}
        stored = [dacc, *(dtype for dtype in self.dtypes if _is_floating(dtype))]
        outputs = zip(stored, epilogue.out_avals, strict=True)
        return [dtype if i in tiles else x.dtype for i, (dtype, x) in enumerate(outputs)]


def _is_floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
