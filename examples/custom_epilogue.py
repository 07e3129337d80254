"""A user's own epilogue: bias, GELU and a row maximum inside the product, with its gradient.

Run it: `python examples/custom_epilogue.py`, on any machine.
"""

import argparse

import jax
import jax.numpy as jnp

import coda_jax as coda


def bias_gelu_max(acc, bias):  # acc (M, N) float32; bias (N,)
    y = jax.nn.gelu(acc + bias)
    return y, jnp.max(y, axis=1)  # a tile, and one number a row


@jax.jit
def layer(x, w, bias):
    return coda.gemm(x, w, bias, epilogue=bias_gelu_max)


def loss(x, w, bias):
    y, largest = layer(x, w, bias)
    return jnp.mean(y.astype(jnp.float32) ** 2) + jnp.mean(largest)


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (512, 256), jnp.bfloat16)
    w = jax.random.normal(keys[1], (256, 1024), jnp.bfloat16) / 16
    bias = jax.random.normal(keys[2], (1024,), jnp.float32)

    y, largest = layer(x, w, bias)
    dx, dw, dbias = jax.grad(loss, argnums=(0, 1, 2))(x, w, bias)
    print(f"y {y.dtype}{y.shape}, largest {largest.dtype}{largest.shape}: {largest[:4]}")
    print(f"dx {dx.dtype}{dx.shape}, dw {dw.dtype}{dw.shape}, dbias {dbias.dtype}{dbias.shape}: {dbias[:4]}")

    plain_y, plain_largest = bias_gelu_max(jnp.dot(x, w, preferred_element_type=jnp.float32), bias)
    error = jnp.max(jnp.abs(y - plain_y)), jnp.max(jnp.abs(largest - plain_largest))
    print(f"against plain JAX in float32: {error[0]:.1e} in y, which is bfloat16, {error[1]:.1e} in largest")

    kernels = layer.lower(x, w, bias).as_text().count("@coda_gemm")
    ran = "the Hopper kernel" if kernels else "the same function evaluated by XLA"
    print(f"on {jax.devices()[0].device_kind} this ran {ran}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
