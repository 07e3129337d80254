"""Every program once at sizes with edges, for compute-sanitizer: `make gpu-sanitize`."""

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks.programs import PROGRAMS


def main() -> None:
    m, k = 264, 136
    for transpose_a, transpose_b in ((False, True), (False, False), (True, False)):
        for name, program in PROGRAMS.items():
            n = program.columns(400)
            a = jax.random.normal(jax.random.key(0), (k, m) if transpose_a else (m, k)).astype(jnp.bfloat16)
            b = jax.random.normal(jax.random.key(1), (n, k) if transpose_b else (k, n)).astype(jnp.bfloat16)

            def fused(a, b, *operands, epilogue=program.epilogue, flags=(transpose_a, transpose_b)):
                return coda.gemm(
                    a,
                    b,
                    *operands,
                    epilogue=epilogue,
                    transpose_a=flags[0],
                    transpose_b=flags[1],
                    implementation="cuda",
                )

            jax.block_until_ready(jax.jit(fused)(a, b, *program.operands(m, n)))
            print(name, "ran", flush=True)
    for name in ("residual_sumsq", "column_sum", "gated_backward"):
        program, config = PROGRAMS[name], coda.GemmConfig(tile_m=64, tile_n=64)
        a, b = (jax.random.normal(jax.random.key(i), (40 + 360 * i, 520)).astype(jnp.bfloat16) for i in range(2))
        operands = program.operands(40, 400)
        out = coda.gemm(
            a, b, *operands, epilogue=program.epilogue, transpose_b=True, implementation="cuda", config=config
        )
        jax.block_until_ready(out)
        print(name, "of few rows ran", flush=True)
    a, b = (jax.random.normal(jax.random.key(i), (264, 2056)).astype(jnp.bfloat16) for i in range(2))
    split = coda.GemmConfig(split_k=True)
    jax.block_until_ready(coda.gemm(a, b, transpose_b=True, implementation="cuda", config=split))
    print("split-K ran", flush=True)
    for name in ("residual_sumsq", "column_sum", "qk_norm_rotary"):
        program, config = PROGRAMS[name], coda.GemmConfig(tile_m=128, tile_n=256)
        b = jax.random.normal(jax.random.key(1), (program.columns(264), 2056)).astype(jnp.bfloat16)
        operands = program.operands(264, len(b))
        out = coda.gemm(
            a, b, *operands, epilogue=program.epilogue, transpose_b=True, implementation="cuda", config=config
        )
        jax.block_until_ready(out)
        print(name, "in a tile that two warpgroups share ran", flush=True)


if __name__ == "__main__":
    main()
