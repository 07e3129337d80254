"""Trains a small Llama on the sources of Python's standard library, bytes as tokens.

    python examples/train_lm.py            # resumes by itself when it was interrupted
    python examples/train_lm.py --help

Everything it needs is on the machine. It ends with the validation bits per byte beside a byte-bigram model's, a sample
of generated text, a loss curve, and what each operator was lowered to.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
import stdlib_text
from checkpoints import Checkpoints, RunFolderError
from progress import Progress
from trainer import Settings, Trainer

import coda_jax as coda

DEFAULTS = {
    "cpu": Settings(
        600, batch=16, context=128, width=128, layers=3, heads=4, dtype="float32", learning_rate=2e-2, seed=0
    ),
    "gpu": Settings(
        2000, batch=64, context=1024, width=512, layers=8, heads=8, dtype="bfloat16", learning_rate=5e-3, seed=0
    ),
}
HELP = {
    "steps": "optimizer steps of the whole run",
    "batch": "windows a step",
    "context": "bytes a window",
    "width": "model width",
    "layers": "transformer blocks",
    "heads": "attention heads",
    "dtype": "compute dtype; parameters are float32",
    "learning_rate": "peak learning rate",
    "seed": "of parameters, data and sample",
}
VALIDATION_BYTES = {"cpu": 2**17, "gpu": 2**22}  # the final figure; during training a quarter of 2**17


def parse_arguments(arguments: list[str] | None, platform: str) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=f"The defaults shown are those for a {platform}.",
    )
    defaults = DEFAULTS[platform]
    for field in dataclasses.fields(Settings):
        default = getattr(defaults, field.name)
        choices = ["float32", "bfloat16", "float16"] if field.name == "dtype" else None
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(default), default=default, choices=choices, help=HELP[field.name])
    parser.add_argument("--out", type=Path, default=Path("runs/train_lm"), help="folder of checkpoints and loss curve")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="steps between checkpoints")
    options = parser.parse_args(arguments)
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    for name in ("steps", "batch", "context", "width", "layers", "heads", "checkpoint_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 < settings.learning_rate < float("inf"):
        parser.error("--learning-rate must be a positive number")
    if settings.width % (2 * settings.heads):
        parser.error("--width must be an even multiple of --heads")
    return settings, options


class Interrupt:
    """Once entered, turns the first SIGINT or SIGTERM into a flag, so that the run can save; the next acts as usual."""

    signal: int | None = None

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        print("\ninterrupted: finishing the step and saving; once more stops at once", file=sys.stderr)
        self.signal = number
        self.__exit__()


def fit(
    trainer: Trainer,
    checkpoints: Checkpoints,
    windows: np.ndarray,
    checkpoint_every: int,
    interrupt: Interrupt,
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Trains from the last checkpoint to the last step, or to an interrupt; returns state and history."""
    settings = trainer.settings
    state, history = trainer.initial_state(), []
    if checkpoints.latest_step is not None:
        state, history = checkpoints.restore(state)
    start = int(state["step"])
    if start == settings.steps:
        return state, history
    if start:
        print(f"resuming at step {start} of {settings.steps}")
    losses: list[jax.Array] = []
    with Progress(settings.steps, start, settings.batch * settings.context) as progress:
        for step in range(start + 1, settings.steps + 1):
            state, loss = trainer.step(state, trainer.text)
            losses.append(loss)
            # Waiting for the step before keeps one step queued on the device.
            progress.update(step, float(losses[-2] if len(losses) > 1 else loss))
            if step == start + 1:
                progress.begin()
            if step % checkpoint_every == 0 or step == settings.steps or interrupt.signal:
                validation = trainer.validate(state["params"], windows)
                history.append({"step": step, "train": float(jnp.mean(jnp.stack(losses))), "validation": validation})
                progress.note(
                    f"step {step}: train {history[-1]['train']:.3f}, validation {validation:.3f} bits per byte"
                )
                losses = []
                checkpoints.save(step, state, history)
            if interrupt.signal:
                break
    return state, history


def main(arguments: list[str] | None = None) -> int:
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    settings, options = parse_arguments(arguments, platform)
    began = time.monotonic()

    train, validation = stdlib_text.load()
    try:
        few, many = (
            stdlib_text.windows(validation, settings.context, max(1, size // settings.context))
            for size in (2**15, VALIDATION_BYTES[platform])
        )
    except ValueError as error:
        print(f"train_lm: --context: {error}", file=sys.stderr)
        return 2
    # The text is part of what the result depends on: another Python has another library.
    described = dataclasses.asdict(settings) | {"text_bytes": len(train)}
    try:
        checkpoints = Checkpoints(options.out, described)
    except RunFolderError as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 2
    finished = checkpoints.latest_step == settings.steps
    with Interrupt() as interrupt:
        trainer = Trainer(settings, train)
        print(
            f"{trainer.num_params / 1e6:.2f}M parameters on {jax.devices()[0].device_kind}, compute in "
            f"{settings.dtype}; {len(train) / 1e6:.1f} MB of text, {len(validation) / 1e6:.2f} MB held out"
        )
        state, history = fit(trainer, checkpoints, few, options.checkpoint_every, interrupt)
        checkpoints.close()
    if interrupt.signal:
        print(f"interrupted: saved at step {int(state['step'])} in {options.out}; the same command resumes")
        return 128 + interrupt.signal
    if finished:
        print(f"this run was already finished; delete {options.out} or give another --out to start over")

    bits = trainer.validate(state["params"], many)
    bigram = stdlib_text.bigram_bits_per_byte(train, many)
    sample = trainer.sample(state["params"], b"import os\n\n\ndef ", 400)
    print(f"\n--- sample ---\n{sample.decode(errors='replace')}\n--- end of sample ---\n")
    explanation = coda.explain(trainer.step_function, state, trainer.text)
    kernels = trainer.step.as_text().count('custom_call_target="coda_gemm"')
    print(f"{explanation}\n{kernels} kernels of {sum(explanation.products.values())} products in the compiled step")
    curve = options.out / "loss.png"
    report.plot(history, bigram, curve)
    print(f"\nloss curve: {curve}")
    print(f"validation: {bits:.3f} bits per byte; byte bigram: {bigram:.3f}; {bigram - bits:.3f} below")
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
