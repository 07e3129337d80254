"""The report's tables: from the rows of one CSV to Markdown."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence

from benchmarks.markdown import geometric_mean, grouped, percent, table

Row = Mapping[str, str]
SHOWN = {
    "coda_product": "coda_jax",
    "coda_by_time_product": "coda_jax, by time",
    "xla_product": "XLA",
    "torch_product": "torch (cuBLAS)",
    "cutlass_pingpong_128x128_product": "CUTLASS pingpong 128 x 128",
    "cutlass_cooperative_128x128_product": "CUTLASS cooperative 128 x 128",
    "cutlass_cooperative_128x256_product": "CUTLASS cooperative 128 x 256",
}
VARIANTS = {
    "coda": "flax_layers",
    "coda_scan": "flax_layers, scan over layers",
    "coda_recompute": 'flax_layers, `remat="save_attention"`',
    "coda_scan_recompute": 'flax_layers, scan, `remat="save_attention"`',
    "coda_recompute_3": 'flax_layers, `remat="save_attention", remat_layers=3`',
    "coda_packed": "flax_layers, packed rows",
    "coda_packed_fp8": "flax_layers in fp8, packed rows",
    "coda_fp8": "flax_layers in fp8, delayed scales",
    "coda_fp8_current": "flax_layers in fp8, current scales",
    "coda_fp8_recompute": 'flax_layers in fp8, delayed scales, `remat="save_attention"`',
    "xla": "plain JAX, unrolled",
    "xla_fp8": "plain JAX in fp8, constant scales",
    "xla_fp8_flax": "plain JAX in fp8, Flax's `fp8_ops`",
    "xla_scan": "plain JAX, scan over layers",
    "xla_scan_remat": "plain JAX, scan with `jax.checkpoint`",
    "xla_packed": "plain JAX, unrolled, packed rows",
    "xla_packed_fp8": "plain JAX in fp8, constant scales, packed rows",
    "xla_remat": "plain JAX, `jax.checkpoint`",
    "xla_cudnn": "plain JAX, `ragged_dot` by cuDNN",
}
MODELS = {
    "llama": "a Llama-3-1B (vocabulary 128256, {layers} layers, d 2048, F 8192, 32 heads and 8 key heads of 64)",
    "8b": "{layers} layers of a Llama-3-8B (vocabulary 128256, d 4096, F 14336, 32 heads and 8 key heads of 128)",
    "gemma2_2b": "a Gemma 2 2B (vocabulary 256000, {layers} layers, d 2304, F 9216, 8 heads and 4 key heads of 256, "
    "scores and logits capped, every second layer with a window of 4096)",
    "gemma3_1b": "a Gemma 3 1B (vocabulary 262144, {layers} layers, d 1152, F 6912, 4 heads and one key head of 256, "
    "five of six layers with a window of 512)",
    "qwen2_1_5b": "a Qwen2.5 1.5B (vocabulary 151936, {layers} layers, d 1536, F 8960, 12 heads and 2 key heads of "
    "128, biases)",
    "qwen3_moe": "a model with Qwen3-30B-A3B's layers (vocabulary 151936, {layers} layers, d 2048, 8 of 128 experts "
    "with F 768, 32 heads and 4 key heads of 128)",
}
EPILOGUES = {
    "residual": "acc + x",
    "residual_sumsq": "acc + x, and the sum of squares of each row",
    "swiglu": "rows scaled; z, and silu(gate) * up at half width",
    "gated_backward": "back through that: reads z, writes dz, the activation and row sums",
    "geglu_backward": "the same with a GELU for its gate",
    "norm_backward": "back through a norm, with the residual's cotangent",
    "bias_gelu": "gelu(acc + bias), tanh form",
    "gelu_backward": "back through that",
    "gelu_erf": "gelu(acc), the error function",
    "mish": "acc * tanh(softplus(acc))",
    "column_sum": "acc + bias, and the sum of each column",
    "rotary_qkv": "rows scaled, heads of q and k rotated; q, k and v apart",
    "logsumexp_pick": "logits, their log-sum-exp and the label's one",
}
EPILOGUE_LABELS = {  # shorter, for pictures and pages
    "residual": "+ residual",
    "residual_sumsq": "+ residual, row sums of squares",
    "swiglu": "norm's factor, SwiGLU",
    "gated_backward": "back through SwiGLU",
    "geglu_backward": "back through GeGLU",
    "norm_backward": "back through a norm",
    "bias_gelu": "bias, GELU",
    "gelu_backward": "back through GELU",
    "gelu_erf": "GELU by erf",
    "column_sum": "bias, column sums",
    "rotary_qkv": "norm's factor, rotary q, k; v",
    "logsumexp_pick": "log-sum-exp and label's logit",
}


def number(row: Row, column: str) -> float:
    return float(row[column])


def sizes(row: Row) -> str:
    return ", ".join(row[name] for name in "mnk")


def tflops(row: Row, seconds: float) -> float:
    return 2e-12 * int(row["m"]) * int(row["n"]) * int(row["k"]) / seconds


def overheads(row: Row) -> tuple[float, float]:
    """The shares that the epilogue adds to the bare product's time: its kernel's, and with what finishes reductions."""
    bare, kernel, fused = (number(row, column) for column in ("bare", "kernel", "fused"))
    return kernel / bare - 1, fused / bare - 1


FUSED = {
    "plain": "plain JAX",
    "grad_of_fuse": "`jax.grad(coda.fuse(loss))`",
    "fuse_of_grad": "`coda.fuse(jax.value_and_grad(loss))`",
    "flax_layers": "flax_layers",
}


def fused_models(rows: Sequence[Row]) -> str:
    steps = [row for row in rows if row["kind"] == "step" and row["ms"]]
    plain = {row["model"]: number(row, "ms") for row in steps if row["variant"] == "plain"}
    columns = ["model", "", "ms", "of plain JAX's", "temporaries, GiB", "products fused", "passes, MB", "kept, MB"]
    lines = [
        [
            row["model"],
            FUSED[row["variant"]],
            f"{number(row, 'ms'):.2f}",
            f"{number(row, 'ms') / plain[row['model']]:.3f}",
            f"{number(row, 'temporaries_gib'):.2f}",
            f"{row['fused_products']} of {row['products']}",
            f"{number(row, 'passes_mb'):.0f}",
            "-" if row["variant"] == "fuse_of_grad" else f"{number(row, 'kept_mb'):.0f}",
        ]
        for row in steps
    ]
    text = "*Kept*: for the backward pass, by `coda.explain`, which cannot tell what that is in a fused gradient.\n\n"
    return text + table(columns, lines)


def training_step(rows: Sequence[Row]) -> str:
    steps = [row for row in rows if row["kind"] == "step" and row["ms"]]
    plain = next((number(row, "ms") for row in steps if row["variant"] == "xla"), math.nan)
    first = steps[0]
    text = (
        f"Value and gradient of the loss of {MODELS[first.get('model', 'llama')].format(**first)} on "
        f"{first['batch']} x {first['length']} tokens, {first.get('param_dtype', 'bfloat16')} parameters. "
        "*Beyond*: kernels that are neither products nor attention. *Gradient*: largest relative distance "
        f"of a kind of parameter's gradient to {_reference(steps)}.\n\n"
    )
    has_alone = all(row.get("alone_ms") for row in steps)
    columns = ["", "ms", "over plain", "beyond, ms", "temporaries, GiB", "peak, GiB", "gradient", "compiled in, s"]
    columns += ["alone, ms", "alone, J"] * has_alone
    text += table(
        columns,
        [
            [
                VARIANTS.get(row["variant"], row["variant"]),
                f"{number(row, 'ms'):.1f}",
                "" if math.isnan(plain) else f"{number(row, 'ms') / plain:.3f}",
                f"{number(row, 'beyond_ms'):.1f}",
                f"{number(row, 'temporaries_gib'):.1f}",
                f"{number(row, 'peak_gib'):.1f}",
                f"{number(row, 'gradient_distance'):.3f}",
                f"{number(row, 'compile_s'):.0f}",
                *(f"{number(row, name):.1f}" for name in ("alone_ms", "alone_joules") if has_alone),
            ]
            for row in steps
        ],
    )
    for row in (row for row in rows if row["kind"] == "step" and not row["ms"]):
        name, needed = VARIANTS.get(row["variant"], row["variant"]), number(row, "temporaries_gib")
        text += f"\n{name}: {row['failure']}, not run. XLA would need {needed:.0f} GiB of temporaries.\n"
    named = {row["variant"] for row in steps}
    pairs = (("coda_packed_fp8", "xla_packed_fp8"), ("coda_fp8", "xla_fp8"), ("coda_recompute", "coda_fp8_recompute"))
    shown_kernels = next((pair for pair in pairs if named.issuperset(pair)), ("coda", "xla"))
    kernels = [row for row in rows if row["kind"] == "kernels" and row["variant"] in shown_kernels]
    by_class = grouped(kernels, lambda row: row["class"])
    longest = {name: max(number(row, "ms") for row in of) for name, of in by_class.items()}
    lines = []
    for name in sorted((name for name in by_class if longest[name] >= 1), key=lambda name: -longest[name]):
        of = {row["variant"]: row for row in by_class[name]}
        shown = [f"{number(of[one], 'ms'):.1f} ({number(of[one], 'count'):.0f})" if one in of else "" for one in
                 shown_kernels]  # fmt: skip
        lines.append([f"`{name}`", *shown])
    text += "\nKernels of a millisecond and more, ms (how many):\n\n"
    text += table(["kernels", *(VARIANTS[name] for name in shown_kernels)], lines)
    if traced := [row for row in rows if row["kind"] == "tracing"]:
        text += "\nSeconds in which steps of other numbers of layers are traced and lowered:\n\n"
        seconds = [f"{number(row, 'trace_s'):.1f}, {number(row, 'lower_s'):.1f}" for row in traced]
        by_variant = grouped(list(zip(traced, seconds, strict=True)), lambda pair: pair[0]["variant"])
        columns = list(dict.fromkeys(row["layers"] for row in traced))
        lines = [[VARIANTS.get(name, name), *(shown for _, shown in pairs)] for name, pairs in by_variant.items()]
        text += table(["", *(f"{layers} layers" for layers in columns)], lines)
    return text


def _reference(steps: Sequence[Row]) -> str:
    """Whose gradient the others are compared with: the plain step's, or where none ran the first one's."""
    if any(row["variant"].startswith("xla") for row in steps):
        return "the unrolled plain step's"
    return "that of the first row, for no plain step ran: it is compared with nothing else here"


def layer(rows: Sequence[Row]) -> str:
    text = (
        "A Llama layer without attention, from the out-projection to the next q, k and v. XLA's layer is the faster of "
        "separate and packed kernels.\n\n"
    )
    lines = []
    for (width, hidden, tokens, which), of in grouped(
        rows, lambda row: (row["width"], row["hidden"], row["tokens"], row["pass"])
    ).items():
        ms = {row["variant"]: number(row, "ms") for row in of}
        bare = ms["products"]
        xla = min(ms["xla"], ms["xla_packed"])
        shares = [f"{one / bare:.2f}" for one in (ms["coda"], xla, ms["coda_products"])]
        lines.append([f"{width}, {hidden}", tokens, which, f"{ms['coda']:.2f}", f"{xla:.2f}", *shares])
    columns = ["d, F", "tokens", "pass", "ours, ms", "XLA's, ms"]
    over = [f"{name}, over XLA's bare products" for name in ("ours", "XLA's", "our bare products")]
    return text + table([*columns, *over], lines)


def product_times(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Column -> microseconds of each bare product; columns that have all of them."""
    bare = [row for row in rows if row["kind"] == "bare"]
    columns = [name for name in bare[0] if name.endswith("_product") and all(row[name] for row in bare)]
    columns.sort(key=lambda name: list(SHOWN).index(name) if name in SHOWN else len(SHOWN))
    return {name: [number(row, name) for row in bare] for name in columns}


def peer_ratios(times: Mapping[str, Sequence[float]], ours: str) -> dict[str, list[float]]:
    """Times of peers over ours: the faster of XLA and torch, and the fastest CUTLASS schedule, where they ran."""
    libraries = [of for name, of in times.items() if name in ("xla_product", "torch_product")]
    schedules = [of for name, of in times.items() if name.startswith("cutlass")]
    found = {"the faster of XLA and torch": libraries, "the fastest CUTLASS schedule": schedules}
    return {
        name: [min(of) / our for our, *of in zip(times[ours], *peers, strict=True)]
        for name, peers in found.items()
        if peers
    }


def _peer_lines(times: Mapping[str, Sequence[float]]) -> str:
    text = ""
    for ours in ("coda_product", "coda_by_time_product"):
        if ours in times:
            found = (
                f"{name} by {geometric_mean(of):.3f} (least {min(of):.3f})"
                for name, of in peer_ratios(times, ours).items()
            )
            text += f"* {SHOWN[ours]}: ahead of {', of '.join(found)}, in the geometric mean.\n"
    return text


def products(rows: Sequence[Row]) -> str:
    times = product_times(rows)
    bare = [row for row in rows if row["kind"] == "bare"]
    text = "TFLOP/s of the bare product, all at one clock, a burst of each in turn; a and b stored as shown.\n\n"
    lines = [
        [row["program"], sizes(row), *(f"{tflops(row, 1e-6 * of[i]):.0f}" for of in times.values())]
        for i, row in enumerate(bare)
    ]
    ours = times["coda_product"]
    over = [geometric_mean([it / our for it, our in zip(of, ours, strict=True)]) for of in times.values()]
    lines.append(["time over coda_jax's", "geometric mean", *(f"{one:.3f}" for one in over)])
    text += table(["a, b", "M, N, K", *(SHOWN.get(name, name) for name in times)], lines)
    return f"{text}\n{_peer_lines(times)}* Peers: {bare[0]['peers']}.\n"


def energy_products(rows: Sequence[Row]) -> str:
    text = "Each alone: TFLOP/s by its own time, then millijoules.\n"
    found = grouped(
        [row for row in rows if row["kind"] == "product"], lambda row: (row["program"], *(row[name] for name in "mnk"))
    )
    names = list(dict.fromkeys(row["variant"] for of in found.values() for row in of))
    titles = [SHOWN.get(name if name.endswith("_product") else f"{name}_product", name) for name in names]
    cells: dict[str, Callable[[Row], str]] = {
        "TFLOP/s": lambda row: f"{tflops(row, number(row, 'seconds')):.0f}",
        "mJ": lambda row: f"{1e3 * number(row, 'joules'):.1f}",
    }
    for unit, cell in cells.items():
        lines = []
        for (layout, *_), of in found.items():
            by_name = {row["variant"]: row for row in of}
            lines.append([layout, sizes(of[0]), *(cell(by_name[name]) for name in names)])
        text += f"\n{table([f'a, b ({unit})', 'M, N, K', *titles], lines)}"
    times = {
        name if name.endswith("_product") else f"{name}_product": [
            number(row, "seconds") for of in found.values() for row in of if row["variant"] == name
        ]
        for name in names
    }
    watts = [number(row, "joules") / number(row, "seconds") for of in found.values() for row in of]
    return f"{text}\n{_peer_lines(times)}* Power: {min(watts):.0f} to {max(watts):.0f} W.\n"


def epilogues(rows: Sequence[Row]) -> str:
    text = (
        "*Overhead*: what the epilogue adds to the bare product of the same shape, the two interleaved; *kernel* is "
        "the product with its epilogue, *all* adds XLA's small kernel that finishes a reduction. The overhead can be "
        "negative: the fused and the bare product may use different tiles.\n\n"
    )
    lines = []
    for row in (row for row in rows if row["kind"] == "epilogue"):
        kernel, whole = overheads(row)
        fused, xla = number(row, "fused"), number(row, "xla")
        name, formula = row["program"], EPILOGUES.get(row["program"], "")
        lines.append(
            [f"`{name}`", formula, sizes(row), f"{number(row, 'bare'):.0f}", percent(kernel), percent(whole),
             f"{fused:.0f}", f"{xla:.0f}", f"{xla / fused:.2f}"]
        )  # fmt: skip
    times = ("ours, us", "XLA's, us", "XLA's / ours")
    return text + table(["epilogue", "", "M, N, K", "bare, us", "overhead, kernel", "all", *times], lines)


def ablation(rows: Sequence[Row]) -> str:
    text = (
        "Parts of an epilogue, each as an epilogue of its own in the tile of the whole; overhead over the bare product "
        "in its own tile. *Copied*: what a copy of the extra bytes would take of the bare product's energy.\n\n"
    )
    lines = []
    for row in rows:
        overhead = number(row, "kernel") / number(row, "bare") - 1
        moved = f"{1e-6 * number(row, 'extra_bytes'):.0f}"
        copied = percent(number(row, "copied"))
        lines.append([f"`{row['program']}`", sizes(row), row["part"], percent(overhead), moved, copied])
    return text + table(["epilogue", "M, N, K", "part", "overhead", "extra MB", "copied"], lines)


def joined(rows: Sequence[Row]) -> str:
    first = rows[0]
    text = (
        f"{first['layers']} Llama blocks under `coda.fuse`, {first['batch']} x {first['length']} tokens, width "
        f"{first['width']}, hidden {first['hidden']}, {first['dtype']}: value and gradient, with weights of products "
        "that read the same array apart, and joined. Every variant has parameters and gradients as it wants them; "
        "*copied*: the step joins those that are apart, and parts the gradients. *Saved*: median and quartiles of "
        "the rounds. *MB* of the products and passes, by `coda.explain`.\n\n"
    )
    lines = []
    for row in (row for row in rows if row["kind"] == "step"):
        saved, low, high = (f"{number(row, f'saved_{name}us'):.0f}" for name in ("", "low_", "high_"))
        parts = (f"{number(row, f'{part}_ms'):.2f}" for part in ("forward", "backward", "attention", "rest"))
        moved = (f"{number(row, f'{part}_mb'):.0f}" for part in ("forward", "backward", "passes", "kept"))
        name = row["variant"].replace("_", ", " if row["variant"].endswith("copied") else " and ")
        lines.append([name, row["products"], f"{number(row, 'ms'):.2f}", f"{saved} ({low} to {high})", *parts, *moved])
    columns = ["joined", "products", "ms", "saved, us", "products forward, ms", "backward", "attention", "rest"]
    return text + table([*columns, "forward, MB", "backward", "passes", "kept"], lines)


def energy_step(rows: Sequence[Row]) -> str:
    text = "Joules of all executions in a training step of the Llama-3-1B above, each product alone.\n\n"
    names = ("xla_product", "bare", "fused")
    lines, total = [], [0.0] * len(names)
    steps = [row for row in rows if row["kind"] == "step"]
    for _, of in grouped(steps, lambda row: (row["times"], row["program"], row["layout"], sizes(row))).items():
        joules = {row["variant"]: int(row["times"]) * number(row, "joules") for row in of}
        each = [joules[name] for name in names]
        total = [sum(both) for both in zip(total, each, strict=True)]
        about = [f"{of[0]['times']} x `{of[0]['program']}`", of[0]["layout"], sizes(of[0])]
        lines.append([*about, *(f"{one:.2f}" for one in each), f"{each[2] / each[0]:.3f}"])
    lines.append(["all", "", "", *(f"{one:.1f}" for one in total), f"{total[2] / total[0]:.3f}"])
    columns = ["products", "a, b", "M, N, K", "XLA's, bare", "ours, bare", "ours, with epilogues", "ours / XLA's bare"]
    return text + table(columns, lines)


def launch(rows: Sequence[Row]) -> str:
    text = f"One link of a chain of {rows[0]['calls']}, (1024, 1024) bfloat16, microseconds.\n\n"
    lines = [
        [row["command_buffers"], f"`{row['program']}`"]
        + [f"{number(row, name):.2f}" for name in ("dispatch_us", "total_us", "kernels_us")]
        + [f"{number(row, 'kernels'):.0f}"]
        for row in rows
    ]
    return text + table(["command buffers", "program", "call returns", "done", "kernels run", "kernels"], lines)


def loss_head(rows: Sequence[Row]) -> str:
    text = (
        "The mean loss of M tokens of D features over V labels, bfloat16; with gradients three products are counted. "
        "*Plain*: an array of all logits. *torch*: all in bfloat16, by its `cross_entropy`.\n\n"
    )
    ours = {"loss": "`linear_cross_entropy`", "logprobs": "`token_logprobs`", "entropy": "`token_logprobs`, entropies"}
    of_xla = {"loss": "plain JAX", "logprobs": "plain JAX, log-probabilities", "entropy": "plain JAX, with entropies"}
    names = {"coda": ours, "xla": of_xla}
    lines = [
        [
            " x ".join(row[size] for size in ("tokens", "width", "vocabulary")),
            "yes" if row["gradient"] == "True" else "",
            names[row["variant"]][row.get("operator", "loss")] if row["variant"] in names else row["variant"],
            f"{number(row, 'ms'):.2f}",
            f"{number(row, 'tflops'):.0f}",
            f"{number(row, 'temporaries_gib'):.2f}",
        ]
        for row in rows
    ]
    return text + table(["M x D x V", "gradients", "", "ms", "TFLOP/s", "temporaries, GiB"], lines)


def loss_curve(rows: Sequence[Row]) -> str:
    compared = [name.removesuffix("_mean_gap") for name in rows[0] if name.endswith("_mean_gap")]
    (reference,) = (
        name
        for name in rows[0]
        if name.startswith("plain_") and f"{name}_gap" not in rows[0] and not name.endswith("gap")
    )
    names = [*compared, reference]
    titles = [name.replace("_", ", ") for name in names]
    text = f"{len(rows)} steps on real text, float32 parameters, nats a byte; gaps to {titles[-1]}.\n\n"
    every = max(25, len(rows) // 8)
    shown = [row for row in rows if int(row["step"]) in (1, len(rows)) or int(row["step"]) % every == 0]
    lines = [[row["step"], *(f"{number(row, name):.4f}" for name in names)] for row in shown]
    for title, column in (("mean gap", "mean_gap"), ("largest gap", "largest_gap")):
        lines.append([title, *(f"{number(rows[0], f'{name}_{column}'):.4f}" for name in compared), ""])
    return text + table(["step", *titles], lines)


def sharded_step(rows: Sequence[Row]) -> str:
    size = rows[0].get("model", "1b").upper()
    text = (
        f"Value and gradient of the loss of a Llama-3-{size}, 2 x 8192 tokens for each part of the batch, bfloat16, "
        "wall clock. *Efficiency*: tokens a second and GPU beside those of the same variant on one GPU. *Exposed*: "
        "time of the first GPU in which a collective runs and nothing else does. Variants of a scheme are interleaved "
        "and have the same shardings and constraints.\n\n"
    )
    columns = ["scheme", "GPUs", "", "ms", "efficiency", "collectives, ms", "exposed, ms", "temporaries, GiB", "calls"]
    lines = [
        [
            row["scheme"],
            row["devices"],
            VARIANTS.get(row["variant"], row["variant"]),
            f"{number(row, 'ms'):.1f}" if row["ms"] else row["failure"],
            f"{number(row, 'efficiency'):.3f}" if row.get("efficiency") else "",  # where one GPU ran, too
            f"{number(row, 'collective_ms'):.1f}" if row["collective_ms"] else "",
            f"{number(row, 'exposed_ms'):.1f}" if row["exposed_ms"] else "",
            f"{number(row, 'temporaries_gib'):.2f}",
            ", ".join(f"{kind} {count}" for kind, count in ast.literal_eval(row["collectives"]).items()),
        ]
        for row in rows
    ]
    return text + table(columns, lines)


def sharded_kernels(rows: Sequence[Row]) -> str:
    text = (
        "Of one step on the first GPU, classes of a millisecond and more: milliseconds and, in brackets, how many; and "
        "of those that ran beside a collective for half of their time or longer. What a CUDA graph launches has no "
        "name.\n\n"
    )

    def of(row: Row, which: str) -> str:
        return f"{number(row, f'{which}ms'):.1f} ({row[f'{which}count']})"

    lines = [
        [
            row["scheme"],
            VARIANTS.get(row["variant"], row["variant"]),
            f"`{row['class']}`",
            of(row, ""),
            of(row, "beside_"),
        ]
        for row in rows
        if number(row, "ms") >= 1
    ]
    return text + table(["scheme", "", "kernels", "ms", "beside a collective"], lines)


def overlap(rows: Sequence[Row]) -> str:
    text = (
        "The gate and up projection of a Llama-3-8B with its SwiGLU, 16384 tokens a GPU, beside a gather of a layer's "
        "weights (436 MB) or a float32 reduce-scatter of their gradients, wall clock. *Yields*: `yield_nanoseconds` "
        "of `coda_jax/tiles/arch.py`, 0 for thread blocks that stay until no tile is left to claim. *Over the "
        "longer*: the time over that of the longer one alone.\n\n"
    )
    lines = []
    for row in rows:
        product, _, move = row["program"].partition(" and ")
        name, _, nanoseconds = product.partition(" ")
        names = {"coda": "coda_jax", "xla": "XLA", "gather": "", "scatter": ""}
        beside = move or (name if name in ("gather", "scatter") else "")
        ms, ratio = f"{number(row, 'ms'):.2f}", f"{number(row, 'over_longer'):.2f}" if move else ""
        lines.append([row["nccl_max_ctas"].replace("0", "default", 1), names[name], nanoseconds, beside, ms, ratio])
    return text + table(["NCCL_MAX_CTAS", "product", "yields, ns", "collective", "ms", "over the longer"], lines)
