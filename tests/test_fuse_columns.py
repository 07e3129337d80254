"""`coda.fuse` takes parts of one product's columns where a function writes these as several axes, or splits them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from tests.gemm_cases import assert_close
from tests.partitioned import collectives, partitioned_on_cpus
from tests.test_fuse import DOORS

BATCH, TOKENS, WIDTH, HIDDEN, HEADS = 2, 256, 128, 512, 2


def norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def gated(parts_of):
    """x + (silu(gate) * up) down, where gate and up are parts of norm(x) gate_up (D, 2, F)."""

    def block(p, x):
        gate, up = parts_of(norm(x, p["scale"]), p["in"].astype(x.dtype))
        hidden = jax.nn.silu(gate) * up
        return x + hidden @ p["out"].astype(x.dtype)

    return block


def attending(parts_of):
    """x + attention(q, k, v) out, where q, k and v are parts of norm(x) qkv (D, 3, H, Dh)."""

    def block(p, x):
        q, k, v = parts_of(norm(x, p["scale"]), p["in"].astype(x.dtype))
        y = coda.attention(q, k, v, is_causal=True).reshape(x.shape)
        return x + y @ p["out"].astype(x.dtype)

    return block


def matrix(w):
    return w.reshape(WIDTH, -1)


def columns(h, w):
    return [(h @ matrix(w))[..., i * HIDDEN : (i + 1) * HIDDEN] for i in range(2)]


def einsum(h, w):
    z = jnp.einsum("btd,dgf->btgf", h, w)
    return z[..., 0, :], z[..., 1, :]


def heads_of(z):
    return z.reshape(*z.shape[:2], HEADS, -1)


FORMS = {
    "gate and up, columns": gated(columns),
    "gate and up, split": gated(lambda h, w: jnp.split(h @ matrix(w), 2, axis=-1)),
    "gate and up, axes": gated(einsum),
    "gate and up, axes that are split": gated(
        lambda h, w: [z[..., 0, :] for z in jnp.split(jnp.einsum("btd,dgf->btgf", h, w), 2, axis=-2)]
    ),
    "gate and up, axes made one": gated(
        lambda h, w: jnp.split(jnp.einsum("btd,dgf->btgf", h, w).reshape(*h.shape[:2], -1), 2, axis=-1)
    ),
    "gate and up, columns made axes": gated(
        lambda h, w: [(h @ matrix(w)).reshape(*h.shape[:2], 2, -1)[:, :, i] for i in (0, 1)]
    ),
    "q, k, v, columns": attending(
        lambda h, w: [heads_of((h @ matrix(w))[..., i * WIDTH : (i + 1) * WIDTH]) for i in range(3)]
    ),
    "q, k, v, split": attending(lambda h, w: map(heads_of, jnp.split(h @ matrix(w), 3, axis=-1))),
    "q, k, v, unpacked": attending(
        lambda h, w: jnp.moveaxis((h @ matrix(w)).reshape(*h.shape[:2], 3, HEADS, -1), 2, 0)
    ),
    "q, k, v, heads in front": attending(
        lambda h, w: [
            z.swapaxes(1, 2) for z in (h @ matrix(w)).reshape(*h.shape[:2], 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        ]
    ),
    "q, k, v, axes": attending(lambda h, w: [jnp.einsum("btd,dnhk->btnhk", h, w)[:, :, i] for i in range(3)]),
}


def arguments(name, dtype, tokens=TOKENS):
    sizes = (2, HIDDEN) if name.startswith("gate") else (3, HEADS, WIDTH // HEADS)
    last = HIDDEN if name.startswith("gate") else WIDTH
    shapes = {"in": (WIDTH, *sizes), "out": (last, WIDTH), "scale": (WIDTH,)}
    keys = jax.random.split(jax.random.key(0), 4)
    p = {of: jax.random.normal(key, shape) / 8 for (of, shape), key in zip(shapes.items(), keys, strict=False)}
    return p, jax.random.normal(keys[3], (BATCH, tokens, WIDTH), dtype)


def loss_of(block):
    return lambda p, x: jnp.sum(jnp.sin(block(p, x).astype(jnp.float32)))


@pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", FORMS)
def test_parts_of_a_product_cost_no_pass_however_they_are_written(name, door):
    """Passes over arrays are those beside slices of columns; values and gradients are those of plain JAX."""
    slices = next(x for x in FORMS if x.endswith(", columns") and x[:4] == name[:4])
    f, first = (DOORS[door](loss_of(FORMS[x])) for x in (name, slices))
    types = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments(name, jnp.bfloat16, 4096))] * 2
    found, expected = (
        coda.explain(g, *args, platform="cuda").totals for g, args in zip((f, first), types, strict=True)
    )
    assert found.passes_bytes <= expected.passes_bytes and found.kept_bytes <= expected.kept_bytes
    p, x = arguments(name, jnp.float32)
    assert_close(f(p, x), jax.value_and_grad(loss_of(FORMS[name]), (0, 1))(p, x), rtol=2e-5)


@pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
@pytest.mark.parametrize("axis", [-1, -2])
def test_norms_of_heads_of_parts_cost_no_pass(axis):
    """Passes are those without the norms; q and k are kept before and behind these, and their product is not."""

    def block(p, x, *, has_norms=True):
        z = norm(x, p["scale"]) @ matrix(p["in"]).astype(x.dtype)
        parts = jnp.split(z if axis == -1 else z.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=axis)
        q, k, v = map(heads_of, parts)
        q, k = (norm(y, s) for y, s in zip((q, k), p["norms"], strict=True)) if has_norms else (q, k)
        return x + coda.attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"].astype(x.dtype)

    def arguments_of(dtype, tokens):
        p, x = arguments("q, k, v", dtype, tokens)
        return p | {"norms": 1 + jax.random.normal(jax.random.key(1), (2, WIDTH // HEADS)) / 8}, x

    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments_of(jnp.bfloat16, 4096))
    found, without = (
        coda.explain(DOORS["grad(fuse)"](loss_of(functools.partial(block, has_norms=flag))), *types, platform="cuda")
        for flag in (True, False)
    )
    kept = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)  # whole products, and no parts of these
    beside_policy = coda.explain(DOORS["grad(fuse)"](loss_of(kept)), *types, platform="cuda")
    assert not beside_policy.other_products
    tile = 2 * BATCH * 4096 * WIDTH
    assert found.totals.passes_bytes < without.totals.passes_bytes + tile / 4
    assert found.totals.kept_bytes < without.totals.kept_bytes + 2.1 * tile
    p, x = arguments_of(jnp.float32, 64)
    assert_close(DOORS["grad(fuse)"](loss_of(block))(p, x), jax.value_and_grad(loss_of(block), (0, 1))(p, x), rtol=2e-5)


@pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
@pytest.mark.parametrize("constrained", ["nothing", "parts", "weights"])
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_a_mesh_shards_both_parts(door, constrained):
    """Weights (D, 2, F) whose F a mesh shards stay as they lie: devices exchange what plain JAX's exchange."""
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])

    def parts(h, w):
        z = jnp.einsum("btd,dgf->btgf", h, w)
        z = jax.lax.with_sharding_constraint(z, P(None, None, None, "tensor")) if constrained == "parts" else z
        return z[..., 0, :], z[..., 1, :]

    def block(p, x):
        is_marked = constrained == "weights"
        return gated(parts)(jax.lax.with_sharding_constraint(p, specs) if is_marked else p, x)

    specs = {"in": P(None, None, "tensor"), "out": P("tensor", None), "scale": P()}
    loss, (p, x) = loss_of(block), arguments("gate", jnp.float32, 64)
    with jax.set_mesh(mesh), partitioned_on_cpus() as records:
        p = {name: jax.device_put(y, NamedSharding(mesh, specs[name])) for name, y in p.items()}
        x = jax.device_put(x, NamedSharding(mesh, P()))
        plain = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(p, x).compile()
        fused = jax.jit(DOORS[door](loss)).lower(p, x).compile()
        assert len(records) == 6 and collectives(fused) == collectives(plain)
        assert_close(fused(p, x), plain(p, x), rtol=2e-5)


def test_a_constraint_of_both_parts_leaves_no_pass():
    """The epilogue of their product makes the activation."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])

    def parts(h, w):
        z = jax.lax.with_sharding_constraint(jnp.einsum("btd,dgf->btgf", h, w), P("data"))
        return z[..., 0, :], z[..., 1, :]

    with jax.set_mesh(mesh):
        p, x = arguments("gate", jnp.bfloat16, 64)
        found = coda.explain(coda.fuse(gated(parts)), p, jnp.concatenate([x, x]), platform="cuda")
    assert any("slice+silu" in line for line in "\n".join(found.blocks).splitlines() if "@" in line)
