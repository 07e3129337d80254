"""Models that are split over the devices of a mesh: loss and gradients, what each device computes, what is moved."""

import collections
import dataclasses
import functools
import itertools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flax_layers as layers
from flax_layers import TransformerBlock, ordered_block, remat
from flax_layers.fused import fused_whole
from flax_layers.models.language_model import LanguageModel, under_rules
from tests import textbook
from tests.gemm_cases import assert_close
from tests.partitioned import Move, moves, partitioned_on_cpus

P = PartitionSpec

# More activations than weights, as in training: where both are cut by one axis, XLA goes by the larger.
LAYERS, BATCH, LENGTH, WIDTH, HIDDEN, VOCABULARY = 2, 8, 128, 256, 256, 512
LLAMA = layers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=8,
)
GPT2 = layers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=8)
TOKENS = jax.random.randint(jax.random.key(0), (BATCH, LENGTH + 1), 0, VOCABULARY)


def first_dimension(name, shape):
    return P("data") if len(shape) > 1 else P()


def largest_dimension(name, shape):
    return P(*[None] * shape.index(max(shape)), "data") if len(shape) > 1 else P()


def tensor_parallel(name, shape):
    if len(shape) < 2:
        return P()
    if any(part in name for part in ("down", "'out'", ".out", "embed")):
        return P("model")
    return P(*[None] * (len(shape) - 1), "model")


def fsdp_and_tensor_parallel(name, shape):
    """An embedding that is cut by its width would have XLA cut the stream by it."""
    if "embed" in name:
        return P(("model", "data"))
    spec = (*tensor_parallel(name, shape), *[None] * len(shape))[: len(shape)]
    return P(*("data" if axis is None and i in (0, len(shape) - 1) else axis for i, axis in enumerate(spec)))


# how parameters lie; sizes of the axes data and model for 8 devices, and for the 4 of a replica
SCHEMES = {
    "data parallel": (lambda *_: P(), (8, 1), (4, 1)),
    "FSDP, first dimension": (first_dimension, (8, 1), (4, 1)),
    "FSDP, largest dimension": (largest_dimension, (8, 1), (4, 1)),
    "tensor parallel": (tensor_parallel, (1, 8), (1, 4)),
    "sequence parallel": (tensor_parallel, (2, 4), (1, 4)),
    "FSDP and tensor parallel": (fsdp_and_tensor_parallel, (4, 2), (2, 2)),
}
# of a layer, forward and backward; of the loss, two of them where exponentials go out of range
PRODUCTS = {"llama": 2 * 18 + 5, "packed": 2 * 12 + 5, "qwen3": 2 * 18 + 5, "gpt2": 2 * 12 + 5, "scan": 19 + 5}
OPTIONS = {"packed": {"separate_qkv": False}, "scan": {"scan_layers": True, "remat": "save_attention"}}
REGIONS = ("automatic", "explicit", "partly manual")


def mesh_of(region, scheme):
    """Axes data and model; partly manual beside an axis of two replicas, over which there is a shard_map."""
    _, sizes, of_replica = SCHEMES[scheme]
    if region == "partly manual":
        return jax.make_mesh((2, *of_replica), ("replica", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    kind = AxisType.Explicit if region == "explicit" else AxisType.Auto
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(kind,) * 2)


def model_of(name, dtype):
    if name == "gpt2":
        return layers.GPT2(GPT2, dtype=dtype, rngs=nnx.Rngs(0))
    config = dataclasses.replace(LLAMA, qk_norm=True) if name == "qwen3" else LLAMA
    options = {"separate_qkv": True} | OPTIONS.get(name, {})
    return layers.Llama(config, dtype=dtype, rngs=nnx.Rngs(0), **options)


def step_of(name, dtype, region="automatic", gradients=None):
    graphdef, params = nnx.split(model_of(name, dtype), nnx.Param)

    def loss(params, tokens):
        return nnx.merge(graphdef, params).loss(tokens[:, :-1], tokens[:, 1:], chunk_bytes=1)  # 128 tokens

    def of_replica(params, tokens):
        return jax.lax.pmean(loss(params, tokens), "replica")

    def of_replicas(params, tokens):
        specs = {"in_specs": (P(), P("replica")), "out_specs": P()}
        return jax.shard_map(of_replica, axis_names={"replica"}, **specs)(params, tokens)

    step = jax.value_and_grad(of_replicas if region == "partly manual" else loss)
    return jax.jit(step, out_shardings=None if gradients is None else (None, gradients)), params


def placed_on(mesh, rule, params, name):
    def place(path, x):
        stacked = name == "scan" and "layers" in jax.tree_util.keystr(path)
        axes = (*[None] * stacked, *rule(jax.tree_util.keystr(path), x.shape[stacked:]), *[None] * x.ndim)[: x.ndim]
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    rows = tuple(axis for axis in ("replica", "data") if axis in mesh.axis_names)
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P(rows, None)))
    return jax.tree_util.tree_map_with_path(place, params), tokens


def cut_by_length(region):
    """Shards the stream of activations between products by T, too, as sequence parallelism asks."""
    spec = P("data", "model") if region != "partly manual" else P(None, "model")

    def laid(x):
        if x.ndim < 2:
            return x
        move = jax.sharding.reshard if region == "explicit" else jax.lax.with_sharding_constraint
        return move(x, P(*spec, *[None] * (x.ndim - 2)))

    return lambda x, name: remat.named(jax.tree.map(laid, x), name)


def traced_anew(monkeypatch):
    """Blocks and losses whose traces are of the lines that a test has replaced."""
    monkeypatch.setattr(TransformerBlock, "__call__", fused_whole(TransformerBlock.__call__.__wrapped__))
    monkeypatch.setattr(LanguageModel, "loss", under_rules(fused_whole(LanguageModel.loss.__wrapped__.__wrapped__)))


@functools.cache
def on_one_device(name):
    """Parameters, and loss and gradients in float32."""
    step, params = step_of(name, jnp.float32)
    return params, jax.device_get(step(params, TOKENS))


def check_model(name, scheme, region, folder, monkeypatch):
    """Compares a training step with that of one device; returns why products are no kernels, and the collectives."""
    rule, *_ = SCHEMES[scheme]
    params, want = on_one_device(name)
    if scheme == "sequence parallel":
        monkeypatch.setattr(ordered_block, "named", cut_by_length(region))
        traced_anew(monkeypatch)
    mesh = mesh_of(region, scheme)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        arguments = placed_on(mesh, rule, params, name)
        gradients = jax.tree.map(lambda x: x.sharding, arguments[0])
        got = step_of(name, jnp.float32, region, gradients)[0](*arguments)
        records.clear()
        lowered = step_of(name, jnp.bfloat16, region, gradients)[0].lower(*arguments)
        _, calls, others, in_loops = moves(lowered, mesh, folder)
    assert_close(jax.device_get(got), want, rtol=1e-5)
    if name != "scan":  # the loss's loop alone
        assert not large(collections.Counter(in_loops))
        assert in_loops or "tensor" not in scheme  # a cut vocabulary has vectors there
    return collections.Counter(selection.reason for _, _, selection in records), calls, others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme", "region"),
    [
        pytest.param(*case, id="-".join(case))
        for case in itertools.product(PRODUCTS, SCHEMES, REGIONS)
        # A stream whose type says that T is cut stays so, and so do queries, which attention cannot take.
        if case[1:] != ("sequence parallel", "explicit")
    ],
)
def test_models(name, scheme, region, tmp_path, monkeypatch):
    """Loss and every gradient in float32; in bfloat16 each device runs the kernel in every product.

    What is moved is what the scheme has to move. Explicit layers of one kind are lowered once.
    """
    reasons, calls, _ = check_model(name, scheme, region, tmp_path, monkeypatch)
    assert reasons == {None: PRODUCTS[name]} if region == "automatic" else set(reasons) == {None}
    if name == "llama" and region == "automatic" and scheme in EXPECTED:
        assert large(calls) == EXPECTED[scheme]()


def large(found):
    """Without vectors: of tokens, of a width, of the vocabulary."""
    return {move: count for move, count in found.items() if move.size_bytes > 4 * max(BATCH * LENGTH, VOCABULARY)}


def tally(*groups):
    """A Counter of moves from (count, kind, dtype, axis, elements)."""
    found = collections.Counter()
    for count, kind, dtype, axis, elements in groups:
        found[Move(kind, dtype, (axis,), elements * {"bf16": 2, "f32": 4}[dtype])] += count
    return dict(found)


# ---- what the schemes have to move, of our calls. A layer has q, k, v (D, D), out (D, D), gate and up (D, 2, F), down
# (F, D). Gradients of parameters are summed in float32.

TOKENS_OF_ALL = BATCH * LENGTH
QKV, OUT, GATE_UP, DOWN = WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * 2 * HIDDEN, HIDDEN * WIDTH
HEAD = WIDTH * VOCABULARY


def summed_gradients(kind, parts=1):
    """The sums of all weights' gradients over data, each of so many parts."""
    return (
        (3 * LAYERS, kind, "f32", "data", QKV // parts),
        (LAYERS, kind, "f32", "data", OUT // parts),
        (LAYERS, kind, "f32", "data", GATE_UP // parts),
        (LAYERS, kind, "f32", "data", DOWN // parts),
        (1, kind, "f32", "data", HEAD // parts),
    )


def gathered_weights(parts=1):
    """In the compute dtype; again in the backward pass, as no rules ask for them to be kept; the head once."""
    return (
        (2 * 3 * LAYERS, "all-gather", "bf16", "data", QKV // parts),
        (2 * LAYERS, "all-gather", "bf16", "data", OUT // parts),
        (2 * LAYERS, "all-gather", "bf16", "data", GATE_UP // parts),
        (2 * LAYERS, "all-gather", "bf16", "data", DOWN // parts),
        (1, "all-gather", "bf16", "data", HEAD // parts),
    )


def summed_activations(tokens):
    """Megatron's: after out and down; dx of q, k, v and of gate and up; of the loss's x."""
    return ((4 * LAYERS + 1, "all-reduce", "bf16", "model", tokens * WIDTH),)


EXPECTED = {
    "data parallel": lambda: tally(*summed_gradients("all-reduce")),
    "FSDP, first dimension": lambda: tally(*gathered_weights(), *summed_gradients("reduce-scatter")),
    "FSDP, largest dimension": lambda: tally(*gathered_weights(), *summed_gradients("reduce-scatter")),
    "tensor parallel": lambda: tally(*summed_activations(TOKENS_OF_ALL)),
    "FSDP and tensor parallel": lambda: tally(
        *gathered_weights(2), *summed_gradients("reduce-scatter", 2), *summed_activations(TOKENS_OF_ALL // 4)
    ),
}


# ---- the same beside plain JAX, for docs/parallel.md: python -m tests.test_partition_models


def plain_step(dtype, gradients):
    """Value and gradient of the textbook's Llama, with the same parameters, all of its logits at once."""

    def loss(params, tokens):
        logits = textbook.llama(nnx.to_pure_dict(params), tokens[:, :-1], LLAMA, dtype).astype(jnp.float32)
        of_label = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_label)

    return jax.jit(jax.value_and_grad(loss), out_shardings=(None, gradients))


def main():
    """Prints a table: kernels reached, and counts and MiB of what is moved, vectors left out."""

    def summary(found):
        kinds = collections.Counter()
        size = collections.Counter()
        for move, count in large(found).items():
            kinds[move.kind, move.dtype] += count
            size[move.kind, move.dtype] += count * move.size_bytes
        each = (f"{' '.join(key)} {kinds[key]} ({size[key] / 2**20:.2f})" for key in sorted(kinds))
        return ", ".join(each)

    print("| scheme | kernels | coda_jax: its calls | XLA's own | plain JAX |\n|---|---|---|---|---|")
    for scheme in EXPECTED:
        rule, mesh = SCHEMES[scheme][0], mesh_of("automatic", scheme)
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second, jax.set_mesh(mesh):
            with partitioned_on_cpus() as records:
                arguments = placed_on(mesh, rule, step_of("llama", jnp.bfloat16)[1], "llama")
                gradients = jax.tree.map(lambda x: x.sharding, arguments[0])
                lowered = step_of("llama", jnp.bfloat16, "automatic", gradients)[0].lower(*arguments)
                _, calls, others, _ = moves(lowered, mesh, pathlib.Path(first))
                reached = sum(selection.reason is None for _, _, selection in records)
            lowered = plain_step(jnp.bfloat16, gradients).lower(*arguments)
            _, *plain, _ = moves(lowered, mesh, pathlib.Path(second))
        plain = summary(plain[0] + plain[1])
        print(
            f"| {scheme} | {reached} of {len(records)} | {summary(calls)} | {summary(others)} | {plain} |", flush=True
        )


if __name__ == "__main__":
    main()
