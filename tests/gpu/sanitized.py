"""Every program once at sizes with edges, for compute-sanitizer: `make gpu-sanitize`.

`python -m tests.gpu.sanitized more` runs that part of `PARTS` alone.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks.lab import operators
from benchmarks.programs import PROGRAMS
from coda_jax.attend import kernel as attention_kernel
from coda_jax.lowering import cuda
from coda_jax.tiles import arch
from tests import block_cases
from tests.attention_cases import EPILOGUES, OF_GRADIENTS
from tests.attention_scores import is_float, learned, scores
from tests.gpu import test_attention, test_blocks, test_fp8_results
from tests.gpu.poisoned import inline_headers


def run(
    name: str,
    m: int,
    n: int,
    k: int,
    *,
    transpose_a: bool = False,
    transpose_b: bool = True,
    config: coda.GemmConfig | None = None,
    about: str = "",
) -> None:
    """A program's kernel, with as many columns as it wants at least."""
    program = PROGRAMS[name]
    n = program.columns(n)
    a = jax.random.normal(jax.random.key(0), (k, m) if transpose_a else (m, k)).astype(jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (n, k) if transpose_b else (k, n)).astype(jnp.bfloat16)
    product = functools.partial(
        coda.gemm,
        epilogue=program.epilogue,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation="cuda",
        config=config,
    )
    jax.block_until_ready(jax.jit(product)(a, b, *program.operands(m, n)))
    print(name, f"{about}ran", flush=True)


def run_groups(config: coda.GemmConfig | None = None, about: str = "") -> None:
    """A product of groups and its gradients: an aligned group, empty ones, one of a row, rows in none."""
    sizes = jnp.array([128, 0, 1, 77, 0, 30], jnp.int32)
    a = jax.random.normal(jax.random.key(0), (264, 136)).astype(jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (6, 136, 384)).astype(jnp.bfloat16)
    bias, scale = coda.ByGroup(jnp.ones((6, 384))), jnp.ones((264, 1))

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        product = functools.partial(coda.ragged_gemm, implementation="cuda", config=config)
        y, squares = product(a, b, sizes, bias, scale, epilogue=_biased)
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(squares)

    jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(a, b))
    print("groups", f"{about}ran", flush=True)


def _biased(acc: jax.Array, bias: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jax.nn.gelu(acc + bias) * scale
    return y, jnp.sum(y * y, axis=1)


def run_symmetric(n: int, k: int, config: coda.GemmConfig | None = None, about: str = "") -> None:
    """A batch of two symmetric products: one result, and two with an operand."""
    xs = jax.random.normal(jax.random.key(0), (2, n, k)).astype(jnp.bfloat16)

    def results(x: jax.Array) -> Any:
        product = functools.partial(coda.symmetric_gemm, implementation="cuda", config=config)
        gram = product(x, x, transpose_b=True)
        return gram, product(gram, gram, gram, epilogue=lambda acc, gram: (acc - gram, acc.astype(jnp.float16)))

    jax.block_until_ready(jax.jit(jax.vmap(results))(xs))
    print("symmetric", f"{about}ran", flush=True)


def run_fp8(name: str, dtype: str, k: int, config: coda.GemmConfig | None = None, about: str = "") -> None:
    """A product with results of 8 bits, transposed ones and a maximum."""
    a, b = test_fp8_results.factors(272, 416, k, dtype)
    jax.block_until_ready(test_fp8_results.product(a, b, name, config, "cuda"))
    print(name, f"of {dtype} {about}ran", flush=True)


def run_block(name: str) -> None:
    """A block of one's own, forward and backward."""
    x, p = block_cases.arguments(jnp.bfloat16, **test_blocks.SIZES["ragged"])
    narrow = {key: w if key in ("cos", "sin") else w.astype(jnp.bfloat16) for key, w in p.items()}
    step = jax.value_and_grad(block_cases.loss(block_cases.in_block(name)), (0, 1))
    jax.block_until_ready(jax.jit(step)(x, narrow))
    print("block", name, "ran", flush=True)


def run_operators() -> None:
    """Each operator, forward and backward."""
    sizes = operators.Sizes(
        batch=2, length=260, width=256, hidden=384, heads=4, kv_heads=2, head_dim=64, experts=4, expert_hidden=128
    )
    for name, case in operators.cases(sizes).items():
        jax.block_until_ready(operators.step("step", case)())
        print(name, "ran", flush=True)


def run_attention(name: str, widths: tuple[int, int], **options: Any) -> None:
    """Attention over 300 tokens of 4 heads, forward and backward."""
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, 300, heads, width)).astype(jnp.bfloat16)
        for i, (heads, width) in enumerate(((4, widths[0]), (2, widths[0]), (2, widths[1])))
    )

    operands = tuple(map(jnp.asarray, options.pop("operands", ())))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> jax.Array:
        y = coda.attention(q, k, v, implementation="cuda", operands=operands, **options)
        return jnp.sum(y.astype(jnp.float32))

    places = (0, 1, 2, *(3 + i for i, x in enumerate(operands) if is_float(x)))
    jax.block_until_ready(jax.jit(jax.grad(loss, places))(q, k, v, *operands))
    print("attention", name, widths, "ran", flush=True)


def run_attention_gradients(name: str, width: int) -> None:
    """The backward kernels with maps of dq, dk and dv."""
    kernels, _, given = test_attention.made_of_gradients(name, 1, 304, 4, 4, width)
    jax.block_until_ready(kernels(*given))
    print("attention with", name, "gradients", width, "ran", flush=True)


def run_attention_results(name: str, width: int) -> None:
    """Attention over 300 tokens whose kernel makes maps of y beside it."""
    given = test_attention.problem(3, 1, 300, 300, 4, 2, width)
    kernel, _, scalars = test_attention.results_beside(name, width, True, given)
    jax.block_until_ready(kernel(*given[:3], *scalars))
    print("attention with", name, width, "ran", flush=True)


def let_all_lanes_arrive() -> None:
    """Lets all lanes of the attention kernels' warps arrive at barriers, and not the first alone.

    That lanes go on together needs no instruction, so there is none that would tell racecheck that the others have read
    what is overwritten next.
    """
    source_of = attention_kernel._source

    def rewritten(function: str, *about: Any, **more: Any) -> str:
        source = inline_headers(source_of(function, *about, **more))
        all_arrive = source.replace("int arriving_lanes = 1;", "int arriving_lanes = 32;")
        if all_arrive == source and function in ("forward", "backward"):
            raise ValueError(f"{function} does not say how many lanes arrive")
        return all_arrive

    attention_kernel._source = rewritten


def run_attentions() -> None:
    """Each kernel of attention, with each kind of mask."""
    let_all_lanes_arrive()
    ids = jnp.repeat(jnp.arange(5), 60)[None]
    first = jnp.maximum(jnp.arange(300) - 70, 0)
    kinds: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "in any order": {"is_causal": True, "config": coda.AttentionConfig(deterministic=False)},
        "of documents": {"is_causal": True, "segment_ids": ids},
        "of unsorted documents": {"segment_ids": ids % 2},
        "of two intervals": {"mask": coda.Intervals(first, jnp.arange(300), first * 0, first * 0 + 9)},
        "with a bias": {"bias": jnp.ones((1, 4, 300, 300)), "mask": jnp.ones((1, 1, 300, 300), bool)},
    }
    for name, options in kinds.items():
        for widths in ((64, 64), (128, 128), (256, 256)):
            run_attention(name, widths, **options)
    run_attention("causal", (192, 128), is_causal=True)


def run_attentions_with_more() -> None:
    """Attention's kernels with score functions, sinks, dropout and maps of y."""
    let_all_lanes_arrive()
    functions = scores(1, 4, 300, 300) | learned(1, 4, 300, 300)
    for name in ("soft cap", "ALiBi with slopes", "documents", "everything"):
        score, operands = functions[name]
        for width in (64, 256):
            run_attention(f"with score {name}", (width, width), is_causal=True, score=score, operands=operands)
    dropout = {"dropout_key": jax.random.key(0), "dropout_rate": 0.1}
    for options in (dropout, {"sinks": jnp.ones(4), **dropout}):
        for widths in ((64, 64), (192, 128), (256, 256)):
            run_attention(f"with {', '.join(options)}", widths, is_causal=True, **options)
    for name in EPILOGUES:
        for width in (64, 256):
            run_attention_results(name, width)
    for width in (64, 128):
        for name in OF_GRADIENTS:
            run_attention_gradients(name, width)


def run_products() -> None:
    """Products by themselves, and the operators and blocks that are made of them."""
    run_operators()
    for name in block_cases.FORMS:
        run_block(name)
    for name in test_fp8_results.PROGRAMS:
        for dtype in ("float8_e4m3fn", "bfloat16"):
            for config in test_fp8_results.CONFIGS:
                run_fp8(name, dtype, 144, config)
        run_fp8(name, "float8_e5m2", 1296, coda.GemmConfig(promote=512), "promoted ")
    for tile_m, tile_n, cluster_m in ((128, 128, 2), (128, 192, 2), (128, 256, 2), (64, 256, 1)):
        run_groups(coda.GemmConfig(tile_m=tile_m, tile_n=tile_n, cluster_m=cluster_m), f"in {tile_m} x {tile_n} ")
    for tile_m, tile_n in arch.SM90.tiles:
        for cluster_m in (1, 2):
            tile = {"tile_m": tile_m, "tile_n": tile_n, "cluster_m": cluster_m}
            run_symmetric(520, 136, coda.GemmConfig(**tile), f"in {tile_m} x {tile_n} ")
    for slots in (1, 3):
        run_symmetric(520, 136, coda.GemmConfig(store_slots=slots, box_n=32), f"with {slots} slots ")
    run_symmetric(264, 2056, coda.GemmConfig(split_k=True), "with split-K ")
    for transpose_a, transpose_b in ((False, True), (False, False), (True, False)):
        for name in PROGRAMS:
            run(name, 264, 400, 136, transpose_a=transpose_a, transpose_b=transpose_b)
    for name in ("residual_sumsq", "column_sum", "gated_backward"):
        run(name, 40, 400, 520, config=coda.GemmConfig(tile_m=64, tile_n=64), about="of few rows ")
    run("identity", 264, 264, 2056, config=coda.GemmConfig(split_k=True), about="with split-K ")
    for name in ("residual_sumsq", "column_sum", "qk_norm_rotary"):
        shared = coda.GemmConfig(tile_m=128, tile_n=256)
        run(name, 264, 264, 2056, config=shared, about="in a cooperative tile ")
    for name in ("residual_sumsq", "column_sum", "gated_backward", "qk_norm_rotary_64"):
        run(name, 264, 400, 136, config=coda.GemmConfig(tile_m=128, column_passes=2), about="in two passes ")
    cuda.is_of_several = lambda ctx: True  # as in a program of several devices
    # A tile or two each, but for the blocks that stay.
    arch.ARCHITECTURES = (dataclasses.replace(arch.SM90, yield_nanoseconds=300),)
    for name in ("residual_sumsq", "column_sum", "gated_backward", "qk_norm_rotary"):
        for tile_n in (128, 256):
            claiming = coda.GemmConfig(tile_m=128, tile_n=tile_n, split_k=False)
            run(name, 2056, 3280 * tile_n // 128, 64, config=claiming, about="claiming its tiles ")
    for tile_n in (128, 256):
        claiming = coda.GemmConfig(tile_m=128, tile_n=tile_n, split_k=False)
        run_symmetric(2056 * tile_n // 128, 64, claiming, "claiming its tiles ")


PARTS = {"attention": run_attentions, "more": run_attentions_with_more, "products": run_products}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
