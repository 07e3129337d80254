"""Text that every machine has: the sources of Python's standard library, as bytes, and a byte-bigram model of it."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256
SEPARATOR = 0  # between files; no source contains it

_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",  # tables written by a program
    "lib-dynload",
}
_SKIPPED_FILES = {"pydoc_data/topics.py"}  # written by a program
_VALIDATION_SHARE = 16  # one file in so many is held out


def source_files(root: Path) -> list[str]:
    """Names of the library's own .py files, relative to root, sorted; without tests and generated files."""
    names = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        generated = name.as_posix() in _SKIPPED_FILES or name.name.startswith("_sysconfigdata")
        skipped = any(part in _SKIPPED_FOLDERS or part.startswith("config-") for part in name.parts[:-1])
        if not generated and not skipped and path.is_file():
            names.append(name.as_posix())
    return sorted(names)


def is_held_out(name: str) -> bool:
    """Whether a file belongs to the validation split: decided by its name alone."""
    return hashlib.sha256(name.encode()).digest()[0] % _VALIDATION_SHARE == 0


def load(root: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The training and the validation text, uint8, files joined by SEPARATOR.

    Raises:
      FileNotFoundError: no sources under root (a Python shipped as a zip file, say).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    names = source_files(root)
    splits = ([n for n in names if not is_held_out(n)], [n for n in names if is_held_out(n)])
    if not all(splits):
        raise FileNotFoundError(f"no sources of the standard library under {root}")
    separator = bytes([SEPARATOR])
    texts = (separator.join((root / n).read_bytes() for n in split) + separator for split in splits)
    train, validation = (np.frombuffer(text, np.uint8) for text in texts)
    return train, validation


def windows(text: np.ndarray, context: int, limit: int) -> np.ndarray:
    """Consecutive windows of context + 1 bytes, each starting on the last byte of the one before; (W, context + 1).

    At most limit windows, spread evenly over the text.
    """
    count = (len(text) - 1) // context
    if count == 0:
        raise ValueError(f"a text of {len(text)} bytes has no window of {context} bytes")
    starts = np.arange(count) * context
    if count > limit:
        starts = starts[np.linspace(0, count - 1, limit).astype(int)]
    return text[starts[:, None] + np.arange(context + 1)]


def bigram_bits_per_byte(train: np.ndarray, validation_windows: np.ndarray) -> float:
    """Bits per byte of a byte-bigram model, on the very predictions the language model is judged by.

    p(b | a) = (count(a, b) + p(b)) / (count(a) + 1), with p(b) = (count(b) + 1) / (sum count + 256), counted on train.
    """
    pairs = train[:-1].astype(np.int64) * VOCAB_SIZE + train[1:]
    counts = np.bincount(pairs, minlength=VOCAB_SIZE**2).reshape(VOCAB_SIZE, VOCAB_SIZE).astype(np.float64)
    unigram = np.bincount(train, minlength=VOCAB_SIZE) + 1.0
    unigram /= unigram.sum()
    probability = (counts + unigram) / (counts.sum(axis=1, keepdims=True) + 1)
    return float(-np.log2(probability[validation_windows[:, :-1], validation_windows[:, 1:]]).mean())
