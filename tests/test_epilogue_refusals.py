"""Refusals: each names the operation, the line, and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coda_jax as coda
from coda_jax.epilogue import NotTileLocalError, trace
from tests.trace_cases import ACC, M, N, typed

REFUSED = {
    "cumsum": (lambda a: jnp.cumsum(a, axis=1), "cumsum"),
    "sort": (lambda a: jnp.sort(a, axis=1), "sort"),
    "argsort": (lambda a: jnp.argsort(a, axis=1), "argsort"),
    "top_k": (lambda a: lax.top_k(a, 2)[0], "top_k"),
    "argmax": (lambda a: jnp.argmax(a, axis=1), "argmax.*Return the maximum"),
    "dot_general": (lambda a: a @ jnp.ones((N, N)), "dot_general.*coda.gemm of its own"),
    "captured_matrix": (lambda a: a @ MATRIX, r"captured array 0 has shape \(8, 8\), which does not broadcast"),
    "outer": (lambda a: (a[:, :, None] * a[:, None, :]).sum(2), "mul.*columns of the product along two of its axes"),
    "outer_sum": (lambda a: (a[:, :, None] * a[:, None, :]).sum((1, 2)), "mul.*along two of its axes"),
    "gram": (lambda a: jnp.einsum("mk,nk->mn", a, a), "dot_general.*coda.gemm of its own"),
    "transpose": (lambda a: a.reshape(M, 2, N // 2).swapaxes(0, 1), "transpose.*changes the order of axes"),
    "reverse": (lambda a: a[:, ::-1], "rev"),
    "roll": (lambda a: jnp.roll(a, 1, axis=1), "roll"),
    "gather": (lambda a: a[:, jnp.array([0, 3])], r"captured array|gather"),
    "column": (lambda a: a[:, 0], r"output 0 has shape \(6,\).*that of a slice of the columns"),
    "row": (lambda a: a[2:3] + a, "slice.*takes 2:3 of the 6 rows"),
    "strided": (lambda a: a[:, ::3], "slice.*takes 0:8:3"),
    "every_second": (lambda a: a[:, ::2], r"output 0 has shape \(6, 4\)"),
    "dynamic_slice": (lambda a: lax.dynamic_slice_in_dim(a, 0, 4, axis=1), "dynamic_slice.*static indices"),
    "update": (lambda a: a.at[:, 0].set(0.0), "scatter"),
    "quarters": (
        lambda a: jnp.concatenate(jnp.split(a, 4, axis=1)[::-1], axis=1),
        "joins 2 and 2 and 2 and 2.*one by one",
    ),
    "two_parts": (lambda a: a[:, :3] * a[:, 3:6], "combines columns 0:3 with columns 3:6"),
    "repeated_rows": (
        lambda a: jnp.sum(jnp.broadcast_to(a[:, :1], (M, 5)), axis=0),
        "of repeated rows or columns|of a slice of the columns",
    ),
    "no_columns": (lambda a: a[:, :0], "takes columns 0:0 of 8"),
    "sum_of_a_part": (lambda a: a[:, :3].sum(1), "reduction of a slice of the columns"),
    "odd_heads": (lambda a: a[:, :6].reshape(M, 2, 3), "heads of 3 of 8 columns"),
    "two_head_sizes": (
        lambda a: (a.reshape(M, 2, 4).reshape(M, N), a.reshape(M, 4, 2).reshape(M, N)),
        "heads of 2 columns beside heads of 4",
    ),
    "half_of_the_heads": (
        lambda a: (a.reshape(M, 2, 4)[:, :, :2] + a.reshape(M, 2, 4)[:, :, 1:3]),
        "takes 1:3 of the 4 column of a heads",
    ),
    "halves_and_neighbours": (
        lambda a: jnp.concatenate([a.reshape(M, 2, 4)[..., 2:], a.reshape(M, 2, 4)[..., 1::2]], axis=-1).reshape(M, N),
        "halves of heads beside even and odd columns|takes every second column",
    ),
    "not_whole_heads": (lambda a: (a.reshape(M, 2, 4).reshape(M, N), a[:, :2]), "no whole heads of 4"),
    "counting_in_heads": (
        lambda a: (a.reshape(M, 2, 4) + jnp.arange(4.0)).reshape(M, N),
        "neither the rows nor the columns",
    ),
    "rows_apart": (lambda a: jnp.split(a, 2, axis=0)[0], r"split.*rows apart into \(3, 3\)"),
    "uneven_concatenate": (lambda a: jnp.concatenate([a, a[:, :4]], axis=1), "joins 8 and 4 elements along axis 1"),
    "three_times": (lambda a: jnp.concatenate([a, a, a], axis=1), "joins 8 and 8 and 8 elements along axis 1"),
    "halves_and_twice": (
        lambda a: jnp.concatenate([jnp.concatenate(jnp.split(a, 2, axis=1)[::-1], axis=1), a], axis=1),
        "joins 8 and 8 elements along axis 1",
    ),
    "concatenate_rows": (lambda a: jnp.concatenate([a, a], axis=0), "joins 8 and 8|joins 6 and 6"),
    "pad_more": (lambda a: jnp.pad(a, 1), "pads axis 0 by 1 and 1"),
    "sum_within_heads": (lambda a: a.reshape(M, 2, 4).sum(-1), r"\(6, 2\), a value for each head.*not returned"),
    "flatten": (lambda a: a.reshape(-1), "reshapes"),
    "row_index_of_product": (lambda a: a.reshape(2, 3, N), "reshapes"),
    "softmax": (lambda a: jax.nn.softmax(a, axis=-1), "with the reduction 'reduce_max'.*only after all tiles"),
    "layer_norm": (lambda a: a - jnp.mean(a, axis=1, keepdims=True), "'sub'.*with the reduction 'reduce_sum'"),
    "logsumexp": (lambda a: coda.logsumexp(a, axis=0), "reduce_logsumexp.*is a log-sum-exp along columns"),
    "weighted_logsumexp": (lambda a: jax.nn.logsumexp(a, axis=1, b=2.0 + a), "with the reduction 'reduce_max'"),
    "log_softmax": (lambda a: a - coda.logsumexp(a, keepdims=True), "with the reduction 'reduce_logsumexp'"),
    "variance": (lambda a: jnp.var(a, axis=1), "combines the tile with the reduction"),
    "vector_sum": (lambda a: a * jnp.sum(VECTOR), "combines the tile with the result of 'reduce_sum'.*before the call"),
    "vector_cumsum": (lambda a: a * jnp.cumsum(VECTOR), "combines the tile with the result of 'cumsum'"),
    "product": (lambda a: jnp.prod(a, axis=1), "reduce_prod.*logarithms"),
    "scan": (lambda a: lax.fori_loop(0, 3, lambda _, x: x * 2, a), "scan.*Unroll"),
    "while": (lambda a: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x * 2, a), "while.*Unroll"),
    "cond": (lambda a: lax.cond(VECTOR[0] > 0, lambda x: x, lambda x: -x, a), "cond|combines"),
    "sum_of_integers": (lambda a: jnp.sum(a.astype(jnp.int32), axis=1), "reduction of int32 values.*float32"),
    "sum_of_other_literals": (lambda a: jnp.sum(jnp.where(a > 0, 3, 0), axis=1), "reduction of int32 values.*float32"),
    "sum_of_negative_literals": (lambda a: jnp.sum(jnp.where(a > 0, -2, 1), axis=0), "reduction of int32 values"),
    "integer_tile": (lambda a: a.astype(jnp.int32), "output 0 is a tile of dtype int32"),
    "bool_tile": (lambda a: (a, a > 0), "output 1 is a tile of dtype bool"),
    "stacked_output": (lambda a: jnp.stack([a, a]), "stack"),
    "extra_axis": (lambda a: a[None], r"output 0 has shape \(1, 6, 8\)"),
    "fp8": (lambda a: a.astype(jnp.float8_e4m3b11fnuz).astype(jnp.float32), "float8_e4m3b11fnuz.*computes in"),
    "bits": (lambda a: lax.bitcast_convert_type(a, jnp.int32), "bitcast_convert_type"),
    "complex": (lambda a: jnp.abs(lax.complex(a, a)), "complex"),
    "digamma": (lambda a: lax.digamma(a), "digamma.*not an operation that epilogues know"),
    "random": (lambda a: a * jax.random.bernoulli(jax.random.key(0), 0.5, a.shape), "combines the tile with|random"),
    "debug_print": (lambda a: [jax.debug.print("{}", a[0, 0]), a][1], "slice|calls back"),
    "callback": (lambda a: jax.pure_callback(lambda x: x, a, a), "pure_callback.*calls back into Python"),
}  # fmt: skip
MATRIX = jnp.ones((N, N))
VECTOR = jnp.arange(float(N))


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name):
    f, message = REFUSED[name]
    with pytest.raises(NotTileLocalError, match=message) as info:
        trace(f, ACC, ())
    assert "epilogue 'lambda'" in str(info.value)


def test_refusal_names_the_users_line():
    def my_epilogue(acc):
        scaled = acc * 2
        return jnp.cumsum(scaled, axis=0)

    line = my_epilogue.__code__.co_firstlineno + 2
    message = rf"epilogue 'my_epilogue': 'cumsum' at .*test_epilogue_refusals.py:{line}.*Allowed in an epilogue"
    with pytest.raises(NotTileLocalError, match=message):
        trace(my_epilogue, ACC, ())


@pytest.mark.parametrize("shape", [(2, 1, N), (2, M, N), (M,), (5,), (M, 2), (1, 4, 1), (2 * M, N), (1, 3)])
def test_refused_operand_shape(shape):
    with pytest.raises(NotTileLocalError, match=r"operand 'bias' has shape .* does not broadcast"):
        trace(lambda acc, bias: acc, ACC, (typed(*shape),))


def test_row_shaped_operand_of_length_m_says_what_to_do():
    with pytest.raises(NotTileLocalError, match=r"Pass it with shape \(M, 1\)"):
        trace(lambda acc, scale: acc, ACC, (typed(M),))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((M, N), jnp.int32), ((M, N), jnp.bool_), ((N,), jnp.int8), ((N,), jnp.uint32)]
)
def test_refused_operand_dtype(shape, dtype):
    with pytest.raises(NotTileLocalError, match=f"operand 'x' of shape .* has dtype {np.dtype(dtype)}"):
        trace(lambda acc, x: acc, ACC, (typed(*shape, dtype=dtype),))


def branch(acc):
    if acc[0, 0] > 0:
        return acc
    return -acc


def branch_on_all(acc):
    return acc if acc > 0 else -acc


def largest(acc):
    return max(acc, 0.0)


def numpy_function(acc):
    return np.exp(acc) + acc


def number(acc):
    return acc * float(acc[0, 0])


def index(acc):
    return acc * [1, 2][acc[0, 0].astype(int)]


@pytest.mark.parametrize(
    ("f", "asked", "cause"),
    [
        (branch, "branches on a traced value.* Use jnp.where", TypeError),
        (branch_on_all, "branches on a traced value.* Use jnp.where", ValueError),
        (largest, "branches on a traced value.* jnp.maximum", ValueError),
        (numpy_function, "calls a function of NumPy.*jnp.exp for np.exp", TypeError),
        (number, r"asks for the number that a traced value is \(float\(\)", TypeError),
        (index, "asks for the number that a traced value is", TypeError),
    ],
)
def test_python_on_traced_values_is_refused_with_its_line(f, asked, cause):
    where = rf"test_epilogue_refusals.py:{f.__code__.co_firstlineno + 1} \({f.__name__}\)"
    with pytest.raises(NotTileLocalError, match=rf"^epilogue '{f.__name__}': .*{where} {asked}") as info:
        trace(f, ACC, ())
    assert isinstance(info.value.__cause__, cause)


def test_errors_of_the_users_own_name_the_users_function():
    def my_epilogue(acc):
        return acc + jnp.zeros(acc[0, 0].astype(int))

    with pytest.raises(TypeError, match=rf"my_epilogue at .*refusals.py:{my_epilogue.__code__.co_firstlineno}"):
        trace(my_epilogue, ACC, ())


@pytest.mark.parametrize("f", [jnp.var, jnp.std])
def test_a_variance_is_refused_and_two_sums_are_named(f):
    with pytest.raises(NotTileLocalError, match=r"finished mean before its sum\. Return jnp.mean\(x, 1\) and"):
        trace(lambda acc: f(acc, axis=1), ACC, ())


def test_allowed_operations_are_listed_for_unknown_ones_alone():
    for name, (f, _) in REFUSED.items():
        with pytest.raises(NotTileLocalError) as info:
            trace(f, ACC, ())
        message = str(info.value)
        is_unknown = "not an operation that epilogues know" in message and "combines the tile with" not in message
        assert ("Allowed in an epilogue" in message) == is_unknown, name


def test_captured_key_is_refused():
    key = jax.random.key(0)
    with pytest.raises(NotTileLocalError, match="pass random numbers"):
        trace(lambda acc: acc * jax.random.normal(key, acc.shape), ACC, ())
