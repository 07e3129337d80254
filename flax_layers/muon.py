"""Muon by coda_jax's products, and which parameters it updates, as which matrices."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_layers.axis_names import Axes, axes_of_parameter
from flax_layers.newton_schulz import MatrixAxes, Method, orthogonalized
from flax_layers.sharding import map_named

# By the last names of a path: the number of axes without that of stacked layers, and the axes of a matrix's rows and
# columns, counted from the last.
_MATRICES = {"experts.gate_up": (4, 3, 1), "experts.down": (3, 2, 1), "kernel": (2, 2, 1), "gate_up": (3, 3, 1)}


def muon_dimension_numbers(params: Any) -> Any:
    """The layers' dimension numbers for `optax.contrib.muon`, which would misread parameters by their number of axes.

        optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=muon_dimension_numbers)

    Muon updates every `kernel` (K, N) and `gate_up` (D, 2, F), the latter as two matrices (D, F), as if they were
    separate projections. Experts' `gate_up` (E, D, 2, F) and `down` (E, F, D) are a matrix for each expert. Layers
    stacked for a scan are a matrix for each layer: their axis is the first, or the one that the names of linen's
    variables say. Query, key and value are one matrix, `qkv.kernel`: dimension numbers do not split columns. Adam has
    the rest: embeddings, norms, biases, the gate of a shared expert, and parameters under a name that ends in head.

    Args:
      params: an nnx.State, of variables or of arrays, or nested dictionaries, as linen's; or gradients as these.
        Another module's kernel with three axes is read as a stack, wrongly for nnx.MultiHeadAttention's.

    Returns:
      The same structure, with optax.contrib.MuonDimensionNumbers for parameters that Muon updates, else None.

    Raises:
      ImportError: an optax before 0.2.6, where Muon knows matrices only.
    """
    # Imported here, so that an older optax stops nothing else.
    from optax.contrib import MuonDimensionNumbers  # type: ignore[import-untyped]

    def dimension_numbers(path: Sequence[str | int], x: Any, metadata: Axes | None) -> Any:
        names = [key for key in path if isinstance(key, str)]
        names = names[:-1] if names[-1:] == ["value"] else names  # the key of a variable's array
        dimensions = next((_MATRICES[end] for end in (".".join(names[-2:]), *names[-1:]) if end in _MATRICES), None)
        if dimensions is None or "shared_gate" in names or any(name.endswith("head") for name in names):
            return None
        count, *from_last = dimensions
        rows, columns = (x.ndim - axis for axis in from_last)
        own = axes_of_parameter(path, count)
        named = metadata if metadata is not None and len(metadata) == x.ndim else ()
        if own is not None and {own.axes[-axis] for axis in from_last} <= {*named}:
            rows, columns = (named.index(own.axes[-axis]) for axis in from_last)
        return MuonDimensionNumbers(rows, columns)

    return map_named(dimension_numbers, params)


def muon(
    learning_rate: Any,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    beta: Any = 0.95,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_eps_root: Any = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: Any = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: Any = None,
    precision: str = "bfloat16",
) -> Any:
    """`optax.contrib.muon` whose Newton-Schulz iterations are coda_jax's products, most of them symmetric.

        from flax_layers.muon import muon, muon_dimension_numbers
        transformation = muon(0.02, muon_weight_dimension_numbers=muon_dimension_numbers)

    All arguments of optax 0.2.8 are taken, and its state: one that optax's Muon has saved is continued, and the other
    way round. What differs is how matrices are orthogonalised: in `precision`, whatever dtype the parameters have;
    those of one shape together; and over the mesh of `jax.set_mesh` each device has its share of them. "spectral"
    takes its norms by XLA's singular values, in float32.

    Args:
      learning_rate, ..., consistent_rms: as of `optax.contrib.muon`.
      precision: "bfloat16", "float16" or "float32": what the products of the iterations read and write. They are summed
        in float32. The first two are kernels on a Hopper GPU; "float32" is XLA's, as all are elsewhere.

    Returns:
      An optax.GradientTransformationExtraArgs.

    Raises:
      ValueError: another precision or preconditioning; what optax refuses of the other arguments.
      TypeError: complex parameters.
      ImportError: without optax.

    Numerics: a matrix's singular values differ from those of optax's Muon in float32 by about 2^-8, as optax's own do
    with bfloat16 parameters. A matrix gives the same bits in every batch and on any number of devices, unless XLA's sum
    for its norm is within its last bits of where the norm's rounding to 8 bits changes.
    """
    arguments = {name: value for name, value in locals().items() if name != "precision"}
    import optax  # type: ignore[import-untyped]  # here, so that its absence stops nothing else
    from optax import contrib

    orthogonal = _Orthogonal(
        Method.of(ns_steps, preconditioning, eps, precision),
        beta,
        None if mu_dtype is None else jnp.dtype(mu_dtype),
        nesterov,
        adaptive,
        consistent_rms,
        functools.partial(_dimension_numbers, muon_weight_dimension_numbers),
    )
    transformation = optax.partition(
        {
            "muon": optax.chain(
                optax.GradientTransformation(_no_init, orthogonal.update),
                optax.stateless(orthogonal.scaled),
                optax.add_decayed_weights(weight_decay, weight_decay_mask),
                optax.scale_by_learning_rate(learning_rate),
            ),
            "adam": optax.adamw(
                learning_rate if adam_learning_rate is None else adam_learning_rate,
                b1=adam_b1,
                b2=adam_b2,
                eps=eps,
                eps_root=adam_eps_root,
                weight_decay=adam_weight_decay,
                mu_dtype=mu_dtype,
                nesterov=nesterov,
            ),
        },
        lambda params: jax.tree.map(_label, orthogonal.numbers_of(params), is_leaf=_is_numbers),
    )
    # Optax checks the arguments and makes the state, in which are the iterations' coefficients.
    return optax.GradientTransformationExtraArgs(contrib.muon(**arguments).init, transformation.update)


def _no_init(params: Any) -> Any:
    raise NotImplementedError("the state is optax's")


class _Orthogonal(NamedTuple):
    """Muon's part of an update, without weight decay and learning rate.

    Attributes:
      method: how matrices are orthogonalised.
      beta, mu_dtype, nesterov: of the momentum.
      adaptive, consistent_rms: how an update is scaled.
      numbers_of: gives the dimension numbers of each parameter.
    """

    method: Method
    beta: Any
    mu_dtype: Any
    nesterov: bool
    adaptive: bool
    consistent_rms: Any
    numbers_of: Callable[[Any], Any]

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """The momentum's matrices orthogonalised, as by `optax.contrib.scale_by_muon`, and its state."""
        del params
        import optax

        beta = self.beta
        mu = _computed_once(optax.tree.update_moment(updates, state.mu, beta, 1))
        count = optax.safe_increment(state.count)
        if self.nesterov:
            ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            corrected = optax.tree.bias_correction(updates, beta, count)
            direction = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, corrected)
        else:
            direction = optax.tree.bias_correction(mu, beta, count)
        momenta, axes, tree = self._matrices(direction)
        results = orthogonalized(momenta, axes, state.ns_coeffs, self.method)
        if self.adaptive:
            results = [jnp.sum(momentum * x) * x for x, momentum in zip(results, momenta, strict=True)]
        return tree.unflatten(results), state._replace(count=count, mu=optax.tree.cast(mu, self.mu_dtype))

    def scaled(self, updates: Any, params: Any = None) -> Any:
        """Each update by a factor of its shape, as optax scales them."""
        del params
        leaves, each_axes, tree = self._matrices(updates)
        return tree.unflatten([self._factor(x, axes) * x for x, axes in zip(leaves, each_axes, strict=True)])

    def _matrices(self, tree: Any) -> tuple[list[jax.Array], list[MatrixAxes], Any]:
        """The arrays of a tree, their axes as matrices, and the tree's structure."""
        structure: Any = jax.tree.structure(tree)
        leaves, numbers = jax.tree.leaves(tree), structure.flatten_up_to(self.numbers_of(tree))
        return leaves, [_matrix_axes(x, of) for x, of in zip(leaves, numbers, strict=True)], structure

    def _factor(self, x: jax.Array, axes: MatrixAxes) -> Any:
        rows, columns = (math.prod(x.shape[axis] for axis in of) for of in (axes.rows, axes.columns))
        if self.consistent_rms is None:
            return math.sqrt(max(1, columns / rows)) if x.size else 1.0
        return math.sqrt(max(rows, columns)) * self.consistent_rms


def _computed_once(momentum: Any) -> Any:
    """The momentum, of which those of unrolled layers are not computed again where they are joined.

    XLA would do so from the momentum before it, which it then copies, for the new one takes its place: 2 GiB of float32
    for a Llama-3-1B. An array by itself is read and written in one pass with what follows.
    """
    counts = collections.Counter(x.shape for x in jax.tree.leaves(momentum))
    return jax.tree.map(lambda x: jax.lax.optimization_barrier(x) if counts[x.shape] > 1 else x, momentum)


def _is_numbers(x: Any) -> bool:
    from optax.contrib import MuonDimensionNumbers

    return x is None or isinstance(x, MuonDimensionNumbers)


def _label(numbers: Any) -> str:
    return "adam" if numbers is None else "muon"


def _dimension_numbers(given: Any, params: Any) -> Any:
    """The dimension numbers of each parameter, or None where Adam updates it, in a tree like `params`.

    Args:
      given: the argument of `muon`: None, dimension numbers for a tree that begins as `params` does, or a function of
        `params` that gives these.
    """
    from optax.contrib import MuonDimensionNumbers

    if given is None:
        return jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, params)
    begins = given(params) if callable(given) else given
    return jax.tree.map(lambda numbers, of: jax.tree.map(lambda _: numbers, of), begins, params, is_leaf=_is_numbers)


def _matrix_axes(x: Any, numbers: Any) -> MatrixAxes:
    """The axes of a parameter that are a matrix's rows, its columns, and those of a batch of them."""
    rows, columns = (
        tuple(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes))
        for axes in (numbers.reduction_axis, numbers.output_axis)
    )
    if both := sorted({*rows} & {*columns}):
        raise ValueError(f"muon: {numbers} of a parameter of shape {x.shape} has axes {both} as rows and as columns")
    batch = tuple(axis for axis in range(x.ndim) if axis not in (*rows, *columns))
    return MatrixAxes(batch, rows, columns)
