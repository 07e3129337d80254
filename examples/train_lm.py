"""Trains a small Llama on the sources of Python's standard library, bytes as tokens.

    python examples/train_lm.py            # resumes by itself when it was interrupted
    python examples/train_lm.py --help
    python examples/train_lm.py --mesh data=2,fsdp=2,tensor=2   # on eight devices; docs/parallel.md has several hosts

Its text is on the machine. It ends with the best checkpoint by validation: a sample that it generates, a loss curve,
its bits per byte on held-out text beside a byte-bigram model's, and which fused kernels ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

if missing := [name for name in ("matplotlib", "optax", "orbax", "rich") if find_spec(name) is None]:
    raise SystemExit(f'train_lm.py needs {", ".join(missing)}: in a clone pip install ".[train,hf]"')

import device_mesh
import jax
import numpy as np
import report
import stdlib_text
from checkpoints import Checkpoints, RunFolderError
from progress import Progress
from trainer import Settings, Trainer, mean

import coda_jax as coda

DEFAULTS = {
    "cpu": Settings(
        600, batch=16, context=128, width=128, layers=3, heads=4, dtype="float32", learning_rate=2e-2, seed=0
    ),
    "gpu": Settings(
        560, batch=64, context=1024, width=512, layers=8, heads=8, dtype="bfloat16", learning_rate=5e-3, seed=0
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
    "accumulate": "parts of a batch, one after another, whose gradients are summed",
    "clip": "greatest norm of the gradient; 0 for any",
    "separate_qkv": "query, key and value kernels of their own, which --mesh tensor=... can cut",
}
STEPS_BETWEEN_SIGNALS = 10  # of several processes, which stop together: so often they ask each other
VALIDATION_BYTES = {"cpu": 2**17, "gpu": 2**22}  # the final figure; during training a quarter of 2**17


def parse_arguments(
    arguments: list[str] | None, platform: str, of_processes: argparse.ArgumentParser
) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=f"The defaults shown are those for a {platform}.",
        parents=[of_processes],
    )
    defaults = DEFAULTS[platform]
    for field in dataclasses.fields(Settings):
        default = getattr(defaults, field.name)
        choices = ["float32", "bfloat16", "float16"] if field.name == "dtype" else None
        name = "--" + field.name.replace("_", "-")
        if default is False:
            parser.add_argument(name, action="store_true", help=HELP[field.name])
            continue
        parser.add_argument(name, type=type(default), default=default, choices=choices, help=HELP[field.name])
    parser.add_argument("--out", type=Path, default=Path("runs/train_lm"), help="folder of checkpoints and loss curve")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="steps between checkpoints")
    axes = "; ".join(f"{name} cuts {what}" for name, what in device_mesh.AXES.items())
    parser.add_argument(
        "--mesh",
        type=device_mesh.mesh_sizes,
        metavar="AXIS=SIZE,...",
        help=f"of all devices; {axes}; default one device",
    )
    options = parser.parse_args(arguments)
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    for name in ("steps", "batch", "context", "width", "layers", "heads", "checkpoint_every", "accumulate"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 < settings.learning_rate < float("inf"):
        parser.error("--learning-rate must be a positive number")
    if settings.width % (2 * settings.heads):
        parser.error("--width must be an even multiple of --heads")
    if not 0 <= settings.clip < float("inf"):
        parser.error("--clip must be a number, at least 0")
    if options.mesh is None and jax.process_count() > 1:
        parser.error(f"{jax.process_count()} processes want a --mesh over their {jax.device_count()} devices")
    try:
        options.mesh = None if options.mesh is None else device_mesh.make_mesh(options.mesh)
    except ValueError as error:
        parser.error(f"--mesh {error}")
    parts, ways = settings.accumulate, device_mesh.batch_ways(options.mesh)
    if settings.batch % (parts * ways):
        parser.error(
            f"--batch {settings.batch} must be a multiple of {parts * ways}: --accumulate {parts} parts, each cut by "
            f"data and fsdp into {ways}"
        )
    return settings, options


class Interrupt:
    """Once entered, turns the first SIGINT or SIGTERM into a flag, so that the run can save; the next acts as usual."""

    signal: int | None = None

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

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
) -> tuple[dict[str, Any], list[dict[str, float]], int]:
    """Trains from the last checkpoint to the last step, or to an interrupt.

    Returns:
      State, history, and the signal that interrupted it, of any process, or 0.
    """
    settings = trainer.settings
    state, history = None, []
    if checkpoints.latest_step is not None:
        state, history = checkpoints.restore(trainer.abstract_state)
    state = trainer.initial_state() if state is None else state
    start, stop = int(state["step"]), 0
    if start == settings.steps:
        return state, history, stop
    if start:
        say(f"resuming at step {start} of {settings.steps}")
    several, losses = jax.process_count() > 1, []
    with Progress(settings.steps, start, settings.batch * settings.context, quiet=jax.process_index() > 0) as progress:
        for step in range(start + 1, settings.steps + 1):
            state, loss = trainer.step(state, trainer.text)
            losses.append(loss)
            # Waiting for the step before keeps one step queued on the device.
            progress.update(step, float(losses[-2] if len(losses) > 1 else loss))
            if step == start + 1:
                progress.begin()
            if not several or step % STEPS_BETWEEN_SIGNALS == 0:
                stop = device_mesh.greatest(interrupt.signal or 0)
            if step % checkpoint_every == 0 or step == settings.steps or stop:
                validation = trainer.validate(state["params"], windows)
                history.append({"step": step, "train": mean(losses), "validation": validation})
                progress.note(
                    f"step {step}: train {history[-1]['train']:.3f}, validation {validation:.3f} bits per byte"
                )
                losses = []
                checkpoints.save(step, state, history)
            if stop:
                break
    return state, history, stop


def say(text: str, **options: Any) -> None:
    """Prints in the first process alone."""
    if jax.process_index() == 0:
        print(text, **options)


def main(arguments: list[str] | None = None) -> int:
    of_processes = argparse.ArgumentParser(add_help=False)
    device_mesh.add_process_arguments(of_processes)
    device_mesh.start_processes(arguments, of_processes)
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    settings, options = parse_arguments(arguments, platform, of_processes)
    began = time.monotonic()

    train, validation = stdlib_text.load()
    try:
        few, many = (
            stdlib_text.windows(validation, settings.context, max(1, size // settings.context))
            for size in (2**15, VALIDATION_BYTES[platform])
        )
    except ValueError as error:
        say(f"train_lm: --context: {error}", file=sys.stderr)
        return 2
    # The text is part of what the result depends on: another Python has another library.
    described = dataclasses.asdict(settings) | {"text_bytes": len(train)}
    try:
        checkpoints = Checkpoints(options.out, described)
    except RunFolderError as error:
        say(f"train_lm: {error}", file=sys.stderr)
        return 2
    finished = checkpoints.latest_step == settings.steps
    with Interrupt() as interrupt:
        try:
            trainer = Trainer(settings, train, options.mesh)
        except ValueError as error:
            say(f"train_lm: --mesh: {error}", file=sys.stderr)
            return 2
        say(
            f"{trainer.num_params / 1e6:.2f}M parameters on {places(options.mesh)}, compute in "
            f"{settings.dtype}; {len(train) / 1e6:.1f} MB of text, {len(validation) / 1e6:.2f} MB held out"
        )
        try:
            state, history, stop = fit(trainer, checkpoints, few, options.checkpoint_every, interrupt)
            checkpoints.wait()
            best, last = checkpoints.best_step, int(state["step"])
            if best != last and not stop:
                del state  # before another takes its place in memory
                state, _ = checkpoints.restore(trainer.abstract_state, best)
            checkpoints.close()
        except RunFolderError as error:
            print(f"train_lm: {error}", file=sys.stderr)  # of any process: each writes what its devices have
            return 1
    if stop:
        say(f"interrupted: saved at step {last} in {options.out}; the same command resumes")
        return 128 + stop
    if finished:
        say(f"this run was already finished; delete {options.out} or give another --out to start over")

    bits = trainer.validate(state["params"], many)
    sample = trainer.sample(state["params"], b"import os\n\n\ndef ", 400)
    if jax.process_index():
        return 0
    bigram = stdlib_text.bigram_bits_per_byte(train, many)
    print(f"\n--- sample of the best checkpoint, step {best}, {bits:.3f} bits per byte ---")
    print(f"{sample.decode(errors='replace')}\n--- end of sample ---\n")
    curve = options.out / "loss.png"
    report.plot(history, bigram, curve)
    print(f"loss curve: {curve}")
    beside = f"{abs(bigram - bits):.3f} {'lower' if bits < bigram else 'higher'} than a byte bigram's {bigram:.3f}"
    print(f"validation: {bits:.3f} bits per byte at step {best}; {beside}")
    print(f"{time.monotonic() - began:.0f} s in all\n")
    with trainer.on_mesh():
        explanation = coda.explain(trainer.step_function, trainer.abstract_state, trainer.text)
    kernels = trainer.step.as_text().count('custom_call_target="coda_gemm"')
    print(report.what_ran(explanation, kernels, settings.accumulate))
    return 0


def places(mesh: jax.sharding.Mesh | None) -> str:
    kind = jax.local_devices()[0].device_kind
    if mesh is None:
        return kind
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{mesh.size} x {kind} ({sizes}; processes: {jax.process_count()})"


if __name__ == "__main__":
    sys.exit(main())
