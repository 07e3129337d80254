"""coda.explain of scanned layers: attention and what is kept are those of a list of layers."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import coda_jax as coda
from flax_layers import Llama, LlamaConfig

T, LAYERS = 512, 2
MASK = T * T  # bytes of a mask for each pair of tokens


@functools.cache
def explained(scan, segments=False, remat=None):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)
    options = {"scan_layers": scan, "remat": remat, "dtype": jnp.bfloat16}
    model = nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(0)))

    def loss(model, tokens, segment_ids):
        more = {"segment_ids": segment_ids} if segments else {}
        return model.loss(tokens, tokens, **more)

    tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
    return coda.explain(nnx.value_and_grad(loss), model, tokens, tokens, device="H100")


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("remat", [None, "full"])
def test_attention_of_scanned_layers_is_that_of_a_list(segments, remat):
    """Segments are an interval of keys for each query, and no array has a number for each pair."""
    listed, scanned = (explained(scan, segments, remat) for scan in (False, True))
    assert scanned.attention_calls == listed.attention_calls
    counts = {one.is_backward: count for one, count in listed.attention_calls.items()}
    assert counts == {False: LAYERS if remat is None else 2 * LAYERS, True: LAYERS}
    assert not scanned.attention and scanned.attention_products == listed.attention_products == 0
    least = T * 256 * 2 * 2  # q, k and v
    assert {one.bytes_read for one in scanned.attention_calls if not one.is_backward} == {least + segments * 2 * 4 * T}
    assert scanned.totals.kept_bytes == pytest.approx(listed.totals.kept_bytes, rel=0.02)
    assert not any(one.array.startswith("bool") and f"{T},{T}]" in one.array for one in scanned.kept)
    # A step's own arrays are held beside the stacked ones: less than half of what a layer keeps.
    kept = explained(scan=False, segments=segments).totals.kept_bytes / LAYERS
    assert scanned.memory.temporaries < listed.memory.temporaries + kept / 2


def test_a_mask_that_others_read_too_is_an_array():
    """It is written before the loop, and each step reads it."""
    array = jax.ShapeDtypeStruct((1, 64, 4, 16), jnp.bfloat16)

    def f(q, allowed, w, shared):
        def layer(q, _):
            y = jax.nn.dot_product_attention(q, q, q, mask=allowed if shared else ~(~allowed))
            return (y + jnp.sum(jnp.where(allowed, 1.0, 0.0)) * shared).astype(q.dtype), None

        return jax.lax.scan(layer, q, length=3)[0]

    allowed = jax.ShapeDtypeStruct((1, 4, 64, 64), jnp.bool_)
    for shared in (True, False):
        found = coda.explain(functools.partial(f, shared=shared), array, allowed, None, platform="cuda")
        ((one, count),) = found.attention.items()
        assert count == 3 and one.bytes_read == 2 * 64 * 64 + 4 * 64 * 64
