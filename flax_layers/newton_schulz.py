"""Newton-Schulz iterations, which make the singular values of many matrices about 1, by coda_jax's products.

An iteration is X <- a X + (b A + c A A) X with A = X X^T. It is three products with epilogues, two of them symmetric:

    A = X X^T        half of its tiles are computed
    B = c A A + b A  half of its tiles are computed, A is read in the epilogue
    X = B X + a X    X is read in the epilogue

A matrix with more rows than columns has A = X^T X and X = X B + a X, so that nothing is transposed. Matrices of one
shape are one batch, which fills the chip: in groups, as the batch needs memory for two of itself.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda

_GROUP_BYTES = 1 << 29  # of the matrices that a device has at a time: 16 of (2048, 8192) in bfloat16
_MOST_SLICES = 8  # of an array with batch axes behind those of its matrices
_LEAST_SCALE = 1e-8  # of optax's "aol" and "schatten"
# Sums are never split along k, so that a matrix gives the same bits in every batch and on any number of devices.
_WHOLE_SUMS = coda.GemmConfig(split_k=False)


class MatrixAxes(NamedTuple):
    """The axes of an array that are those of a batch of matrices, a matrix's rows, and its columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


class Method(NamedTuple):
    """How matrices are orthogonalised.

    Attributes:
      steps: iterations, where all have the same coefficients.
      preconditioning: what scales a matrix before them, as in `optax.contrib.muon`: "frobenius" and "spectral" their
        norms; "schatten" the root of the Frobenius norm of A; "aol" row i by 1 / sqrt(sum_j |A_ij|), arXiv 2512.04632.
      eps: added to the norm that divides a matrix.
      dtype: in which products read and write.
    """

    steps: int
    preconditioning: str
    eps: Any
    dtype: jnp.dtype

    @classmethod
    def of(cls, steps: int, preconditioning: str, eps: Any, precision: str) -> Method:
        """The method of these arguments of Muon.

        Raises:
          ValueError: names that there are not.
        """
        known = {
            "preconditioning": (preconditioning, ("frobenius", "spectral", "aol", "schatten")),
            "precision": (precision, ("bfloat16", "float16", "float32")),
        }
        for name, (given, possible) in known.items():
            if given not in possible:
                raise ValueError(f"muon: {name} = {given!r}; it must be one of {', '.join(map(repr, possible))}")
        return cls(steps, preconditioning, eps, jnp.dtype(precision))


def orthogonalized(
    arrays: Sequence[jax.Array], axes: Sequence[MatrixAxes], coefficients: jax.Array, method: Method
) -> list[jax.Array]:
    """U f(S) V^T of each matrix U S V^T, where f takes all but the least of its singular values to about 1.

    Matrices of one shape are computed together, those of several arrays too. Over a mesh each device has its share of
    them: they are sent to it in `method.dtype`, and so are the results to where the array is.

    Args:
      arrays: floats of any shapes.
      axes: of each array.
      coefficients: (3,), a, b and c of every iteration; or (steps, 3), those of each.
      method: what the iterations are.

    Returns:
      Arrays of the same shapes and dtypes.

    Raises:
      TypeError: a complex array.
    """
    for x in arrays:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"muon: a parameter of shape {x.shape} is {x.dtype}; matrices must be real")
    function = functools.partial(_orthogonalized, axes=axes, method=method)
    if explicit := _mesh_axes(AxisType.Explicit):
        shardings = [jax.typeof(x).sharding for x in arrays]
        function = jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)
    return function(list(arrays), coefficients)


def _orthogonalized(
    arrays: list[jax.Array], coefficients: jax.Array, *, axes: Sequence[MatrixAxes], method: Method
) -> list[jax.Array]:
    coefficients = jnp.asarray(coefficients, jnp.float32)
    originals, arrays = arrays, [_rounded_where_it_is(x, method.dtype) for x in arrays]
    each_step = list(coefficients) if coefficients.ndim == 2 else [coefficients] * method.steps
    stacks_of = [_stacks(x, of) for x, of in zip(arrays, axes, strict=True)]
    stacks = [*itertools.chain(*stacks_of)]
    done: list[list[jax.Array]] = [[] for _ in stacks]
    one = jax.lax.optimization_barrier(jnp.ones((), jnp.float32))
    for shape in dict.fromkeys(x.shape[1:] for x in stacks):
        members = [i for i, x in enumerate(stacks) if x.shape[1:] == shape and x.size]
        for pieces in _groups([len(stacks[i]) for i in members], _most(shape, method.dtype)):
            parts = [stacks[members[i]][first:end] for i, first, end in pieces]
            batch = _concatenate([x * one.astype(x.dtype) for x in parts])
            # A group begins when the one before it has ended: else all of them are in memory at a time.
            results, one = jax.lax.optimization_barrier((_iterated(batch, each_step, method), one))
            ends = itertools.accumulate((end - first for _, first, end in pieces), initial=0)
            for (i, first, end), at in zip(pieces, ends, strict=False):
                done[members[i]].append(results[at : at + end - first])
    rest = iter(_concatenate(parts) if parts else x for parts, x in zip(done, stacks, strict=True))
    each = zip(stacks_of, originals, axes, strict=True)
    return [
        _converted_where_it_goes(_unstacked([next(rest) for _ in own], x.shape, of), x.dtype) for own, x, of in each
    ]


def _sliced(shape: Sequence[int], axes: MatrixAxes) -> tuple[int, ...]:
    """The batch axes, behind one of a matrix, along which an array is sliced: XLA would transpose it as a whole."""
    inner = tuple(axis for axis in axes.batch if axis > min(*axes.rows, *axes.columns))
    return inner if math.prod(shape[axis] for axis in inner) <= _MOST_SLICES else ()


def _stacks(x: jax.Array, axes: MatrixAxes) -> list[jax.Array]:
    """The matrices of an array, (batch, M, N): for each index of its `_sliced` axes."""
    sliced = _sliced(x.shape, axes)
    kept = [axis for axis in range(x.ndim) if axis not in sliced]
    order = [[kept.index(axis) for axis in of if axis not in sliced] for of in axes]
    stacks = []
    for index in itertools.product(*(range(x.shape[axis]) for axis in sliced)):
        at = dict(zip(sliced, index, strict=True))
        one = x[tuple(at.get(axis, slice(None)) for axis in range(x.ndim))]
        sizes = [math.prod(one.shape[axis] for axis in of) for of in order]
        stacks.append(one.transpose([*itertools.chain(*order)]).reshape(sizes))
    return stacks


def _unstacked(stacks: Sequence[jax.Array], shape: Sequence[int], axes: MatrixAxes) -> jax.Array:
    """Undoes `_stacks`."""
    sliced = _sliced(shape, axes)
    order = [axis for axis in itertools.chain(*axes) if axis not in sliced]
    places = [order.index(axis) for axis in sorted(order)]
    each = [x.reshape([shape[axis] for axis in order]).transpose(places) for x in stacks]
    return _stacked_along(each, [(axis, shape[axis]) for axis in sliced])


def _stacked_along(parts: Sequence[jax.Array], axes: Sequence[tuple[int, int]]) -> jax.Array:
    """Arrays in the order of their indices along new axes, (place, size) each, the first place first."""
    if not axes:
        return parts[0]
    (axis, size), *rest = axes
    rest = [(place - 1, count) for place, count in rest]
    each = len(parts) // size
    return jnp.stack([_stacked_along(parts[i * each : (i + 1) * each], rest) for i in range(size)], axis)


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _most(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """The number of matrices in a group, over all devices."""
    return max(1, _GROUP_BYTES // max(1, math.prod(shape) * dtype.itemsize)) * _devices()


def _groups(sizes: Sequence[int], most: int) -> Iterable[list[tuple[int, int, int]]]:
    """Groups of at most `most` of the matrices in stacks of these sizes: (stack, first, end) of each part of a group.

    They are as few and as equal as can be.
    """
    starts = [0, *itertools.accumulate(sizes)]
    count = -(-starts[-1] // most)
    for group in range(count):
        low, high = (edge * starts[-1] // count for edge in (group, group + 1))
        parts = [(i, max(low, starts[i]) - starts[i], min(high, starts[i + 1]) - starts[i]) for i in range(len(sizes))]
        yield [(i, first, end) for i, first, end in parts if first < end]


def _iterated(x: jax.Array, coefficients: Sequence[jax.Array], method: Method) -> jax.Array:
    """The iterations on (batch, M, N) in `method.dtype`."""
    count, x = len(x), _with_zeros(x)
    gram, polynomial, applied = _products(is_tall=x.shape[1] > x.shape[2], dtype=method.dtype)
    ones = jnp.ones(len(x), jnp.float32)
    scale = _scale(x, method)
    for i, (a, b, c) in enumerate(coefficients):
        of_step = scale if i == 0 and scale is not None else ones
        squared = _shared(gram(x, of_step))
        if i == 0 and scale is None:
            x, squared = _scaled_by_gram(x, squared, method.preconditioning)
        x = _shared(applied(x, _shared(polynomial(squared, b, c)), a, of_step))
    return x[:count]


def _scale(x: jax.Array, method: Method) -> jax.Array | None:
    """(batch,) float32, the factor of each matrix in front of the iterations; None if it follows from A.

    It is rounded to 8 bits if the matrices have no more: XLA's sums depend on the batch in their last bits.
    """
    match method.preconditioning:
        case "frobenius":
            norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2)))
        case "spectral":
            norm = jnp.linalg.norm(x.astype(jnp.float32), ord=2, axis=(1, 2))
        case _:
            return None
    scale = 1 / (norm + method.eps)
    return jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7) if method.dtype.itemsize == 2 else scale


def _scaled_by_gram(x: jax.Array, gram: jax.Array, preconditioning: str) -> tuple[jax.Array, jax.Array]:
    """X and A of the matrix that A itself scales; with more rows than columns "aol" scales these."""
    of_gram = gram.astype(jnp.float32)
    if preconditioning == "aol":
        sizes = jnp.sum(jnp.abs(of_gram), axis=2)
    else:
        sizes = jnp.broadcast_to(jnp.linalg.norm(of_gram, axis=(1, 2))[:, None], gram.shape[:2])
    scale = jax.lax.rsqrt(jnp.maximum(sizes, _LEAST_SCALE))
    of_x = scale[:, None, :] if x.shape[1] > x.shape[2] else scale[:, :, None]
    return (x * of_x).astype(x.dtype), (of_gram * scale[:, :, None] * scale[:, None, :]).astype(x.dtype)


def _products(*, is_tall: bool, dtype: jnp.dtype) -> tuple[Callable[..., jax.Array], ...]:
    """The three products of an iteration, of batches: (x, scale), (gram, b, c) and (x, polynomial, a, scale)."""
    options: dict[str, Any] = {"config": _WHOLE_SUMS, "implementation": "xla" if dtype == jnp.float32 else "auto"}

    def gram(x: jax.Array, scale: jax.Array) -> jax.Array:
        return coda.symmetric_gemm(
            x, x, scale, epilogue=_scaled_twice, transpose_a=is_tall, transpose_b=not is_tall, **options
        )

    def polynomial(squared: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return coda.symmetric_gemm(squared, squared, squared, b, c, epilogue=_polynomial, **options)

    def applied(x: jax.Array, factor: jax.Array, a: jax.Array, scale: jax.Array) -> jax.Array:
        factors = (x, factor) if is_tall else (factor, x)
        return coda.gemm(*factors, x, a, scale, epilogue=_step, **options)

    return (
        jax.vmap(gram),
        jax.vmap(polynomial, in_axes=(0, None, None)),
        jax.vmap(applied, in_axes=(0, 0, None, 0)),
    )


def _scaled_twice(acc: jax.Array, scale: jax.Array) -> jax.Array:
    return acc * (scale * scale)


def _polynomial(acc: jax.Array, gram: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return c * acc + b * gram


def _step(acc: jax.Array, x: jax.Array, a: jax.Array, scale: jax.Array) -> jax.Array:
    return (acc + a * x) * scale


def _rounded_where_it_is(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x in this dtype, converted before XLA moves it to other devices."""
    return _converted(x, dtype, lambda operand, _: operand)


def _converted_where_it_goes(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x in this dtype, converted when XLA has moved it to where its readers have it."""
    return _converted(x, dtype, lambda _, result: result)


def _converted(x: jax.Array, dtype: jnp.dtype, chosen: Callable[[Any, Any], Any]) -> jax.Array:
    """x in this dtype. What is said of the sharding of x or of the result does not spread to the other.

    Args:
      chosen: (sharding of x, of the result) -> that of the devices' parts that are converted.
    """
    if _devices() == 1 or x.dtype == dtype:
        return x.astype(dtype)

    @custom_partitioning
    def convert(x: jax.Array) -> jax.Array:
        return x.astype(dtype)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        sharding = chosen(operands[0].sharding, result.sharding)
        return mesh, lambda x: x.astype(dtype), sharding, (sharding,)

    names = [f"i{axis}" for axis in range(x.ndim)], [f"o{axis}" for axis in range(x.ndim)]
    convert.def_partition(partition=partition, sharding_rule=" -> ".join(map(" ".join, names)))
    converted: jax.Array = convert(x)
    return converted


def _mesh_axes(type_: AxisType) -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name, of in zip(mesh.axis_names, mesh.axis_types, strict=True) if of is type_)


def _devices() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in _mesh_axes(AxisType.Auto))


def _with_zeros(x: jax.Array) -> jax.Array:
    """(batch, M, N) with zeros behind it, so that each device of the mesh has as many whole matrices."""
    return _shared(jnp.pad(x, ((0, -len(x) % _devices()), (0, 0), (0, 0))) if len(x) % _devices() else x)


def _shared(x: jax.Array) -> jax.Array:
    """(batch, M, N), of which each device of the mesh has its share of whole matrices."""
    if _devices() == 1:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(_mesh_axes(AxisType.Auto))))
