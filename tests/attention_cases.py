"""Cases of attention's kernels on the host (tests/emulated_sm90): arrays, launches, and what these should give."""

import ctypes
import dataclasses
import functools
import math
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax import rotary
from coda_jax.attend import dropout
from coda_jax.attend.gradients import Gradients
from coda_jax.attend.joined import Joined
from coda_jax.attend.kernel import BackwardTiles, ForwardTiles, gradient_of_sums
from coda_jax.attend.results import Results
from coda_jax.attend.score import HIDDEN, trace
from coda_jax.attend.score.text import emit
from coda_jax.epilogue import emit as emit_epilogue
from coda_jax.epilogue import random_bits, saturate
from coda_jax.epilogue import trace as trace_epilogue
from tests.tolerance import check

TESTS = pathlib.Path(__file__).resolve().parent
HEADERS = TESTS.parent / "cuda"
UNBOUNDED = 1 << 30
GUARD = 256  # bytes before and behind an array, which stay as they are


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A choice of dtype, widths, tiles and masks for which kernels are compiled."""

    head: int = 64
    value_head: int = 64
    arrays: bool = False
    second: bool = False
    ids: bool = False
    dense: bool = False
    bias: bool = False
    even_rows: bool = False  # of the dense mask and the bias
    sinks: bool = False
    dropout_rate: float = 0.0
    dtype: str = "bf16"
    deterministic: bool = True
    split: bool = False
    score: str = ""  # the text of a score function
    has_tables: bool = False  # of which there are gradients
    results: str | None = None  # of `EPILOGUES`
    keeps_y: bool = True
    gradients: str | None = None  # of `OF_GRADIENTS`, for the sizes of a case
    sizes: tuple = ()  # batch, rows, heads and key heads of that

    @property
    def of_gradients(self):
        return gradients_of(self.gradients, *self.sizes, self.head, self.value_head, self.numpy)

    @property
    def text_of_gradients(self):
        """The definitions of the gradients' epilogues, members of the backward kernel's Config, and that of dq."""
        if self.gradients is None:
            return "", "", ""
        made, definitions, structs = self.of_gradients, "", []
        for which, name in enumerate(("of_queries", "of_keys", "of_values")):
            one = Joined.of(made, which)
            definitions += f"namespace {name} {{\n{one.text()}}}\n"
            members = ", ".join(f"{member} = {int(value)}" for member, value in (one.config | one.columns).items())
            structs.append(f"using Epilogue = {name}::Epilogue; static constexpr int {members};")
        of_queries, of_keys, of_values = structs
        nested = f"    struct OfKeys {{ {of_keys} }};\n    struct OfValues {{ {of_values} }};\n"
        return definitions, nested, f"  struct OfQueries : Backward {{ {of_queries} }};\n"

    @property
    def forward(self):
        return ForwardTiles.of(self.head, self.value_head, 1 << 20)

    @property
    def backward(self):
        return BackwardTiles.of(self.head, self.value_head)

    @property
    def epilogue(self):
        if self.results is None:
            return ""
        results = results_of(self.results, 32, 64)
        return "\n" + emit_epilogue(results.program, results.dtypes, [False] * results.count)

    @property
    def members_of_results(self):
        if self.results is None:
            return ""
        results = results_of(self.results, 32, 64)
        first = results.count + len(results.program.reductions)
        pointers, keeps = first + len(results.dtypes), int(self.keeps_y)
        return f"""    using Epilogue = ::Epilogue;
    static constexpr int result_pointers = {pointers}, first_store = {first};
    static constexpr bool keeps_result = {keeps};
"""

    @property
    def numpy(self):
        return np.dtype(jnp.bfloat16 if self.dtype == "bf16" else np.float16)

    @property
    def drops(self):
        return self.dropout_rate > 0

    @property
    def text(self):
        forward, backward = self.forward, self.backward
        vectors = 2 + self.arrays * (4 if self.second else 2) + self.ids + self.drops
        forward_bytes = forward.shared_bytes(self.arrays, self.ids)
        backward_bytes = backward.shared_bytes(vectors, self.has_tables)
        flags = {
            "has_arrays": self.arrays,
            "has_second": self.second,
            "has_ids": self.ids,
            "has_dense": self.dense,
            "has_bias": self.bias,
            "has_even_rows": self.even_rows,
            "has_sinks": self.sinks,
            "has_dropout": self.drops,
        }
        definitions, nested, of_queries = self.text_of_gradients
        return f"""
{self.score}{self.epilogue}
{definitions}
{dropout.text(self.dropout_rate) if self.drops else "namespace dropout { struct Epilogue; }"}
struct Common {{
  {"using Score = ::Score;" if self.score else ""}
  using Dropout = dropout::Epilogue;
  static constexpr float kept_factor = {float(1 / (1 - self.dropout_rate))}f;
  static constexpr DType input = DType::{self.dtype}, bias_type = DType::f32;
  static constexpr int head = {self.head}, value_head = {self.value_head};
  static constexpr bool {", ".join(f"{name} = {int(is_set)}" for name, is_set in flags.items())};
}};
struct Tiles {{
  struct Forward : Common {{
    static constexpr int keys = {forward.keys}, consumers = {forward.consumers};
    static constexpr int stages = {forward.stages}, q_stages = {forward.q_stages}, shared_bytes = {forward_bytes};
{self.members_of_results}  }};
  struct Backward : Common {{
    static constexpr int dim = {backward.dim}, keys = {backward.keys}, queries = {backward.queries};
    static constexpr int stages = {backward.stages}, shared_bytes = {backward_bytes};
    static constexpr bool deterministic = {int(self.deterministic)}, is_split = {int(self.split)};
{nested}  }};
{of_queries}}};
"""


E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)


def copies_in_8_bits(y, scale):
    y8 = saturate(y * scale, E4M3)
    return y8, y8.T, jnp.max(jnp.abs(y))


def in_many_dtypes(y, scale, shift):
    """One result is stored transposed alone, one is beyond its dtype's range, and maxima are of both signs."""
    wide = (y * 3e5).astype(E5M2)
    z = y * scale + shift
    return wide, z.astype(jnp.bfloat16), saturate(z, E4M3).T, y - 1, jnp.max(y), jnp.max(-z - 50)


EPILOGUES = {"copies_in_8_bits": (copies_in_8_bits, 1), "in_many_dtypes": (in_many_dtypes, 2)}


@functools.cache
def results_of(name, rows, columns, keeps_y=True):
    """An epilogue of `EPILOGUES` beside y of this size as a matrix, as attention's primitive has it."""
    function, count = EPILOGUES[name]
    scalars = [jax.ShapeDtypeStruct((), np.float32)] * count
    traced, _ = trace_epilogue(function, jax.ShapeDtypeStruct((rows, columns), np.float32), scalars)
    return Results(traced.program, tuple(traced.out_avals[x.output].dtype for x in traced.program.stores), keeps_y)


def _normalised(z, scale):
    """The heads of z (M, H, Dh) over their root mean squares, times a scale of each column, as of Qwen3."""
    return z * jax.lax.rsqrt(jnp.mean(z * z, axis=2, keepdims=True) + 1e-6) * scale


def _of_gradient(x, scale, z, cos, sin, factor, norm, width, dtype, sums):
    """x turned back, times a factor of each row, as a product in 16 or in 8 bits reads it; and sums of x z.

    Args:
      norm: the scale of a norm of z's heads, whose cotangent x turned back is; the sums are behind the norm then.
      sums: whether sums along columns are made too, of what is turned back; behind a norm the gradient of its scale.
    """
    inner, of_columns = jnp.sum(x * z, axis=1), ()
    if cos is not None:
        cos, sin = (jnp.tile(table, (x.shape[0] // table.shape[0], 1)) for table in (cos, sin))
        x = rotary(x.reshape(len(x), -1, width), cos, -sin).reshape(x.shape)
    if norm is not None:
        heads = (len(x), -1, width)
        pulled_back, of_scale = jax.vjp(_normalised, z.reshape(heads), norm)[1](x.reshape(heads))
        x = pulled_back.reshape(x.shape)
        inner, of_columns = jnp.sum(x * z, axis=1), (of_scale,) if sums else ()
    elif sums:
        of_columns = (jnp.sum(x, axis=0),)
    x = x * factor
    if dtype == E4M3:
        return (x8 := saturate(x * scale, E4M3)), x8.T, inner, jnp.max(jnp.abs(x)), *of_columns
    return x.astype(dtype), inner, *of_columns


class OfGradients(NamedTuple):
    """The maps that are made of the gradients.

    Attributes:
      is_turned: whether q and k are turned.
      dtype: of the tiles.
      members: the gradients whose columns a tile has.
      sums: whether there are sums along columns.
      is_normed: whether the heads of q and k had a norm before they were turned.
    """

    is_turned: bool
    dtype: np.dtype
    members: tuple[tuple[int, ...], ...]
    sums: bool = False
    is_normed: bool = False


ALL, EACH = ((0, 1, 2),), ((0,), (1,), (2,))
OF_GRADIENTS = {
    "turned": OfGradients(True, np.dtype(jnp.bfloat16), ALL),
    "turned_in_8_bits": OfGradients(True, E4M3, ALL),
    "joined": OfGradients(False, np.dtype(jnp.bfloat16), ALL),
    "joined_in_8_bits": OfGradients(False, E4M3, ALL),
    "turned_apart": OfGradients(True, np.dtype(jnp.bfloat16), EACH, sums=True),
    "turned_apart_in_8_bits": OfGradients(True, E4M3, EACH),
    "keys_and_values": OfGradients(False, np.dtype(jnp.bfloat16), ((0,), (1, 2)), sums=True),
    "queries_and_keys": OfGradients(True, E4M3, ((0, 1), (2,))),
    "normed": OfGradients(True, np.dtype(jnp.bfloat16), ALL, sums=True, is_normed=True),
    "normed_in_8_bits": OfGradients(True, E4M3, ALL, sums=True, is_normed=True),
    "normed_apart": OfGradients(False, np.dtype(jnp.bfloat16), EACH, is_normed=True),
}


@functools.cache
def gradients_of(name, batch, rows, heads, key_heads, width, value_width, of=jnp.bfloat16):
    """Epilogues of `OF_GRADIENTS` of gradients of these sizes.

    Operands: scale, factor, cos, sin, q, k and v, and the scales of the norms of q and k.

    Args:
      of: the dtype of q, k and v.
    """
    is_turned, dtype, members, sums, is_normed = OF_GRADIENTS[name]
    programs, places = [], []
    for i, (count, of_head) in enumerate(((heads, width), (key_heads, width), (key_heads, value_width))):
        tables = [jax.ShapeDtypeStruct((rows, width // 2), np.float32)] * 2 if is_turned and i < 2 else []
        tile = jax.ShapeDtypeStruct((batch * rows, count * of_head), of)
        factor = jax.ShapeDtypeStruct((batch * rows, 1), np.float32)
        norm = [jax.ShapeDtypeStruct((width,), np.float32)] if is_normed and i < 2 else []
        types = [jax.ShapeDtypeStruct((), np.float32), factor, *tables, tile, *norm]

        def function(x, scale, factor, *others, width=width, tables=tables):
            count = len(tables)
            of_tables, (z, *norms) = others[:count] or (None, None), others[count:]
            return _of_gradient(x, scale, z, *of_tables, factor, *(norms or [None]), width, dtype, sums)

        traced, _ = trace_epilogue(function, jax.ShapeDtypeStruct(tile.shape, np.float32), types)
        programs.append(traced.program)
        places.append((0, 1, *((2, 3) if tables else ()), 4 + i, *([7 + i] if norm else [])))
    dtypes = (dtype, dtype) if dtype == E4M3 else (dtype,)
    dtypes = tuple(dtype for dtype in dtypes for _ in members)
    return Gradients(tuple(programs), tuple(places), 9, members * (len(dtypes) // len(members)), dtypes)


class Schedule(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("resident", "order", "starved", "late_copies", "late_products")]


COUNTS = ("batch", "queries", "keys", "heads", "key_heads", "left", "right", "splits")
ARRAYS = (
    *("q", "k", "v", "dy", "dlse", "y", "lse", "claimed", "intervals", "query_ids", "key_ids"),
    *("needed", "full", "order", "needed_rows", "full_rows", "needed_keys", "order_of_keys", "positions"),
    *("dense", "bias", "sinks", "row_bits", "padded_row_bits", "column_bits"),
    *("lse_2", "delta", "sums", "turns", "dk", "dv", "dq"),
    *(f"score_array_{i}" for i in range(4)),
    *(f"gradient_sums_{i}" for i in range(4)),
    *(f"entries_{i}" for i in range(4)),
)


OF_GRADIENT = ("of_queries", "of_keys", "of_values")


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in COUNTS),
        *((name, ctypes.c_int * 4) for name in ("dense_sizes", "bias_sizes")),
        ("scale", ctypes.c_float),
        ("schedule", Schedule),
        *((name, ctypes.c_void_p) for name in ARRAYS),
        ("results", ctypes.c_void_p * 8),
        *((name, ctypes.c_void_p * 16) for name in OF_GRADIENT),
        ("columns", ctypes.c_int),
    ]


ENTRIES = ("forward", "prepare", "backward", "finish_dq")  # in the order of their launches
COMMAND = ("g++", "-std=c++20", "-Og", "-w", "-fPIC", "-fno-gnu-unique")


def compiled(folder, *arguments):
    done = subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[:4000])


class Fault(NamedTuple):
    """A fault planted in the kernels' text."""

    header: str  # attention_{header}.cuh
    right: str  # what stands there, once
    wrong: str


@functools.cache
def kernels(kernel, folder, fault=None):
    """The library of these kernels; of ones with a `Fault` in their text."""
    at = folder / str(len(list(folder.iterdir())))
    at.mkdir()
    for path in HEADERS.glob("attention_*.cuh"):
        text = path.read_text()
        if fault is not None and path.name == f"attention_{fault.header}.cuh":
            if text.count(fault.right) != 1:
                raise RuntimeError(f"{path.name} has {fault.right!r} {text.count(fault.right)} times")
            text = text.replace(fault.right, fault.wrong)
        (at / path.name).write_text(text.replace("extern __shared__", "extern"))
    shutil.copy(folder / "attention.cc", at)
    (at / "tiles.h").write_text(kernel.text)
    compiled(at, f"-I{folder}", "-shared", "-o", "run.so", "attention.cc")
    library = ctypes.CDLL(str(at / "run.so"))
    for name in ENTRIES:
        getattr(library, name).restype = ctypes.c_char_p
    return library


def common_headers(folder):
    """Fills a folder with the headers that all kernels have in common, those of the instructions replaced."""
    for path in HEADERS.glob("*.cuh"):
        if not path.name.startswith("attention_"):
            shutil.copy(path, folder)
    shutil.move(folder / "accumulator_sm90.cuh", folder / "device_accumulator_sm90.cuh")
    shutil.copytree(TESTS / "emulated_sm90", folder, dirs_exist_ok=True)
    compiled(folder, "-x", "c++-header", "-o", "threads.h.gch", "threads.h")
    return folder


# ---- arrays


def guarded(like, is_poisoned=False):
    """A copy of an array, or an array of NaNs, between bytes that are all ones."""
    like = np.asarray(like)
    memory = np.full(like.nbytes + 2 * GUARD + 64, 0xFF, np.uint8)
    first = GUARD + -memory.ctypes.data % 64
    of = memory[first : first + like.nbytes].view(like.dtype).reshape(like.shape)
    if not is_poisoned:
        of[...] = like
    return memory, of


def is_intact(memory, of):
    first = of.ctypes.data - memory.ctypes.data
    return (memory[:first] == 0xFF).all() and (memory[first + of.nbytes :] == 0xFF).all()


def up_to(count, size):
    return -(-count // size) * size


def as_words(bits):
    """Bits of the last axis as 32-bit words."""
    bits = np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 32)])
    words = bits.reshape(*bits.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return words.sum(-1).astype(np.uint32)


def tiles_of(seen, rows, columns, exactly=True):
    """Flags of tiles of (batch, heads, queries, keys): whether any of it is seen, and whether all of it is.

    Not `exactly`: all may hold something, and none is seen entirely.
    """
    size = [up_to(count, of) for count, of in zip(seen.shape[2:], (rows, columns), strict=True)]
    padded = np.zeros((*seen.shape[:2], *size), bool)
    padded[:, :, : seen.shape[2], : seen.shape[3]] = seen
    tiles = padded.reshape(*seen.shape[:2], size[0] // rows, rows, size[1] // columns, columns)
    needed, full = tiles.any((1, 3, 5)), tiles.all((1, 3, 5))
    return (needed, full) if exactly else (np.ones_like(needed), np.zeros_like(full))


def most_first(needed):
    """The order of tiles: those that see the most first."""
    return np.argsort(-needed.sum(-1).reshape(-1), kind="stable").astype(np.int32)


@dataclasses.dataclass
class Mask:
    """A mask's parts, as the kernels take them; unpadded."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    intervals: np.ndarray | None = None  # (batch, 2 or 4, queries)
    query_ids: np.ndarray | None = None
    key_ids: np.ndarray | None = None
    dense: np.ndarray | None = None
    bias: np.ndarray | None = None
    exactly: bool = True  # tiles are listed

    def seen(self, batch, heads, queries, keys):
        i, j = np.arange(queries)[:, None], np.arange(keys)
        seen = np.broadcast_to((i - self.left <= j) & (j <= i + self.right), (batch, 1, queries, keys))
        if self.intervals is not None:
            first, last = self.intervals[:, ::2, :, None], self.intervals[:, 1::2, :, None]
            seen = ((first <= j) & (j <= last)).any(1, keepdims=True)
        if self.query_ids is not None:
            seen = seen & (self.query_ids[:, None, :, None] == self.key_ids[:, None, None, :])
        if self.dense is not None:
            seen = seen & self.dense
        return np.broadcast_to(seen, (batch, heads, queries, keys))


@dataclasses.dataclass
class Case:
    kernel: Kernel
    mask: Mask
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dy: np.ndarray
    dlse: np.ndarray
    scale: float
    splits: int = 1
    sinks: np.ndarray | None = None  # (batch, heads)
    row_bits: np.ndarray | None = None  # (batch, heads, queries)
    score: Callable | None = None
    operands: tuple = ()
    score_arrays: tuple = ()  # as the kernels take them
    gradients: tuple = ()  # the numbers of those of which the backward kernel makes the gradients
    read: Callable | None = None  # the arrays that the score reads, of its operands
    tables: tuple = ()  # for each of those of `gradients` the table by distance, or None
    entries: tuple = ()  # that the distances of tables read, as the kernel takes them

    @property
    def dropped(self):
        """The factors of probabilities, (batch, heads, queries, keys)."""
        rate = self.kernel.dropout_rate
        if rate == 0:
            return 1.0
        columns = random_bits.column_bits(jnp.arange(self.k.shape[1], dtype=jnp.int32))
        return np.asarray(random_bits.is_kept(self.row_bits[..., None], columns, rate)) / (1 - rate)

    @property
    def listed(self):
        """The pairs that see each other by the mask, and by the score too where tiles are listed."""
        seen = self.mask.seen(len(self.q), self.q.shape[2], self.q.shape[1], self.k.shape[1])
        return seen & self.shown if self.kernel.arrays else seen

    @property
    def without_results(self):
        return dataclasses.replace(self, kernel=dataclasses.replace(self.kernel, results=None, keeps_y=True))

    @property
    def seen(self):
        return self.mask.seen(len(self.q), self.q.shape[2], self.q.shape[1], self.k.shape[1]) & self.shown

    @functools.cached_property
    def shown(self):
        """The pairs that the score does not hide."""
        if self.score is None:
            return True
        groups = self.q.shape[2] // self.k.shape[2]
        k = np.repeat(self.k.astype(np.float64), groups, axis=2)
        s = self.scale * np.einsum("bthd,bshd->bhts", self.q.astype(np.float64), k)
        return self.scored(s)[0] > HIDDEN

    def scored(self, s):
        """The score of scaled products, and its derivative, in their dtype."""
        with jax.enable_x64(True):
            operands = [jnp.asarray(x, s.dtype if x.dtype.kind == "f" else None) for x in self.operands]
            value, pullback = jax.vjp(lambda s: self.score(s, *operands), jnp.asarray(s))
            (slope,) = pullback(jnp.ones_like(value))
            return np.asarray(value), np.asarray(slope)

    @property
    def places(self):
        """The operands that are differentiated."""
        return [i for i, x in enumerate(self.operands) if x.dtype.kind == "f"] if self.gradients else []

    def of_operands(self, gradients):
        """The gradients of the operands, by their names, from those of the arrays that the kernels take."""

        def arrays(*differentiated):
            given = dict(enumerate(self.operands)) | dict(zip(self.places, differentiated, strict=True))
            read = self.read(*(given[i] for i in range(len(given))))
            return [read[number] for number in self.gradients]

        _, pullback = jax.vjp(arrays, *(jnp.asarray(self.operands[i]) for i in self.places))
        return {f"gradient_{i}": np.asarray(x) for i, x in zip(self.places, pullback(gradients), strict=True)}

    def of_scores(self, s, ds):
        """The gradients of the operands, by their names, from the cotangents of scores."""
        with jax.enable_x64(True):
            operands = [jnp.asarray(x, s.dtype if x.dtype.kind == "f" else None) for x in self.operands]
            places = self.places

            def score(*differentiated):
                given = dict(enumerate(operands)) | dict(zip(places, differentiated, strict=True))
                return self.score(jnp.asarray(s), *(given[i] for i in range(len(operands))))

            _, pullback = jax.vjp(score, *(operands[i] for i in places))
            return {f"gradient_{i}": np.asarray(x) for i, x in zip(places, pullback(jnp.asarray(ds)), strict=True)}


def case(kernel, mask, batch=1, queries=200, keys=None, heads=1, groups=1, splits=1, seed=0):
    random = np.random.default_rng(seed)
    keys = queries if keys is None else keys

    def normal(*shape):
        return random.standard_normal(shape, np.float32)

    return Case(
        kernel,
        mask,
        normal(batch, queries, heads, kernel.head).astype(kernel.numpy),
        normal(batch, keys, heads // groups, kernel.head).astype(kernel.numpy),
        normal(batch, keys, heads // groups, kernel.value_head).astype(kernel.numpy),
        normal(batch, queries, heads, kernel.value_head).astype(kernel.numpy),
        normal(batch, heads, queries),
        kernel.head**-0.5,
        splits,
        normal(batch, heads) if kernel.sinks else None,
        random.integers(-(2**31), 2**31, (batch, heads, queries), np.int32) if kernel.drops else None,
    )


def scored(kernel, mask, score, operands=(), *, differentiated=False, first_row=None, **sizes):
    """A case with a score function, a JAX function score(s, *operands), whose arrays may be differentiated.

    Args:
      first_row: that of the first query, where positions of queries are an array, as those of a device's part are.
    """
    one = case(kernel, mask, **sizes)
    shape = (len(one.q), one.q.shape[2], one.q.shape[1], one.k.shape[1])

    def read(*operands):
        return trace(score, [jnp.asarray(x) for x in operands], shape)[1]

    traced, arrays = trace(score, [jnp.asarray(x) for x in operands], shape)
    gradients = traced.sums_of_kernel([x.shape for x in arrays]) if differentiated else ()
    if first_row is not None:
        rows = jnp.arange(first_row, first_row + shape[2], dtype=jnp.int32)
        traced, arrays = traced.with_rows_of_array(), (*arrays, rows.reshape(1, 1, -1, 1))
    tables = tuple(traced.table_of.get(number) for number in gradients)
    kernel = dataclasses.replace(kernel, score=emit(traced, arrays, gradients), has_tables=any(tables))
    each = [(table, arrays[number].shape[3]) for table, number in zip(tables, gradients, strict=True) if table]
    return dataclasses.replace(
        one,
        kernel=kernel,
        score=score,
        operands=tuple(operands),
        score_arrays=tuple(map(np.asarray, arrays)),
        gradients=gradients,
        read=read,
        tables=tables,
        entries=tuple(np.asarray(kernel.backward.entries(traced, *of)) for of in each),
    )


# ---- what kernels give, and what they should


def mask_arrays(case):
    """The mask's arrays and its tiles, by the names of `ARRAYS`."""
    kernel, mask, values = case.kernel, case.mask, {}
    (batch, queries), keys = case.q.shape[:2], case.k.shape[1]
    padded_queries, padded_keys = up_to(queries, 128), up_to(keys, 128)
    tile_keys, tile_queries, seen = kernel.backward.keys, kernel.backward.queries, case.listed
    if kernel.arrays:
        forward_tiles = tiles_of(seen, kernel.forward.rows, kernel.forward.keys, mask.exactly)
        needed, full = tiles_of(seen, tile_queries, tile_keys, mask.exactly)
        values |= {
            "needed": as_words(forward_tiles[0]),
            "full": as_words(forward_tiles[1]),
            "needed_rows": as_words(needed.swapaxes(1, 2)),
            "full_rows": as_words(full.swapaxes(1, 2)),
            "needed_keys": as_words(needed),
            "order": most_first(forward_tiles[0]),
            "order_of_keys": most_first(needed.swapaxes(1, 2)),
        }
        values["positions"] = np.argsort(values["order_of_keys"]).astype(np.int32)
        count = mask.intervals.shape[1]
        intervals = np.empty((batch, count, padded_queries), np.int32)
        intervals[:, ::2], intervals[:, 1::2] = keys, -1
        intervals[:, :, :queries] = mask.intervals
        values["intervals"] = intervals
    if kernel.ids:
        for name, ids, size in (
            ("query_ids", mask.query_ids, padded_queries),
            ("key_ids", mask.key_ids, padded_keys),
        ):
            values[name] = np.pad(ids.astype(np.int32), ((0, 0), (0, size - ids.shape[1])))
    if kernel.dense:
        values["dense"] = mask.dense.astype(np.uint8)
    if kernel.bias:
        values["bias"] = mask.bias.astype(np.float32)
    values |= {f"score_array_{i}": x for i, x in enumerate(case.score_arrays)}
    return values


def run(case, folder, schedule=None, fault=None, operands=()):
    """y, lse, dq, dk, dv as the kernels make them; of a kernel with gradients, these and not dq, dk and dv.

    Args:
      operands: of the maps of the gradients.
    """
    kernel, mask, q, k = case.kernel, case.mask, case.q, case.k
    library = kernels(kernel, folder, fault)
    (batch, queries, heads, _), keys, key_heads = q.shape, k.shape[1], k.shape[2]
    padded_queries = up_to(queries, 128)
    tile_keys, tile_queries, seen = kernel.backward.keys, kernel.backward.queries, case.listed
    query_tiles = -(-queries // tile_queries)
    dim_part = tile_queries * kernel.backward.dim // 2
    sums = np.zeros((batch, heads, query_tiles, 2, dim_part), np.float32)
    of_split = (case.splits,) if kernel.split else ()
    of_result = np.float32 if kernel.split else kernel.numpy
    values = {name: getattr(case, name) for name in ("q", "k", "v", "dy", "dlse")}
    values |= mask_arrays(case)
    if kernel.sinks:
        values["sinks"] = case.sinks
    if kernel.drops:
        padding = ((0, 0), (0, 0), (0, padded_queries - queries))
        values |= {"row_bits": case.row_bits, "padded_row_bits": np.pad(case.row_bits, padding)}
        values["column_bits"] = np.array(random_bits.column_bits(jnp.arange(up_to(keys, 128), dtype=jnp.int32)))
    values["claimed"] = np.zeros(1, np.int32)
    of_arrays = {f"gradient_sums_{i}": case.score_arrays[number] for i, number in enumerate(case.gradients)}
    for (name, x), table in zip(of_arrays.items(), case.tables, strict=True):
        values[name] = np.zeros(kernel.backward.sums_shape(x.shape, (batch, heads, queries, keys), table), np.float32)
    values |= {f"entries_{i}": x for i, x in enumerate(case.entries)}
    made = {
        "y": np.empty((batch, queries, heads, kernel.value_head), kernel.numpy),
        "lse": np.empty((batch, heads, queries), np.float32),
        "lse_2": np.empty((batch, heads, padded_queries), np.float32),
        "delta": np.empty((batch, heads, padded_queries), np.float32),
        "dk": np.empty((*of_split, *k.shape), of_result),
        "dv": np.empty((*of_split, *case.v.shape), of_result),
        "dq": np.empty(q.shape, kernel.numpy),
    }
    if kernel.deterministic:
        made["sums"] = sums
        values["turns"] = np.zeros((batch, heads, query_tiles), np.int32)
    else:
        values["sums"] = sums
    joined = None if kernel.gradients is None else _Joined.of(case, operands)
    if joined is not None:
        made = {name: x for name, x in made.items() if name not in ("dq", "dk", "dv")} | joined.made
        values |= joined.given
    arrays = {name: guarded(x) for name, x in values.items()} | {name: guarded(x, True) for name, x in made.items()}
    problem = Problem(
        **dict(zip(COUNTS, (batch, queries, keys, heads, key_heads), strict=False)),
        left=mask.left,
        right=mask.right,
        splits=case.splits,
        scale=case.scale,
        schedule=Schedule(1, 0, 0, 0, 1) if schedule is None else schedule,
        **{name: x.ctypes.data for name, (_, x) in arrays.items() if name in ARRAYS},
    )
    if joined is not None:
        joined.point(problem, {name: x.ctypes.data for name, (_, x) in arrays.items()})
    for name in ("dense", "bias"):
        if getattr(kernel, name):
            setattr(problem, f"{name}_sizes", (ctypes.c_int * 4)(*getattr(mask, name).shape))
    for name in ENTRIES:
        wrong = getattr(library, name)(ctypes.byref(problem)).decode()
        assert not wrong, f"{name}: {wrong}"
    for name, (memory, x) in arrays.items():
        assert is_intact(memory, x), f"something wrote beside {name}"
        if name in values and name not in ("claimed", "turns", "sums", *of_arrays):
            np.testing.assert_array_equal(x.view(np.uint8), np.ascontiguousarray(values[name]).view(np.uint8))
    got = {name: x for name, (_, x) in arrays.items()}
    if kernel.deterministic:
        needed = tiles_of(seen, tile_queries, tile_keys, mask.exactly)[0]
        expected = np.broadcast_to(needed.sum(-1)[:, None], got["turns"].shape)
        np.testing.assert_array_equal(got["turns"], expected, err_msg="turns")
    if joined is not None:
        return joined.results(got)
    out = {name: got[name] for name in ("y", "lse", "dq", "dk", "dv")}
    if kernel.sinks:
        out["delta"] = got["delta"][:, :, :queries]
    if kernel.split:
        out |= {name: out[name].sum(0).astype(kernel.numpy) for name in ("dk", "dv")}
    entries, found = iter(case.entries), []
    for (name, x), table in zip(of_arrays.items(), case.tables, strict=True):
        like, of = jax.ShapeDtypeStruct(x.shape, np.float32), jnp.asarray(next(entries)) if table else None
        found.append(gradient_of_sums(jnp.asarray(got[name]), like, of))
    return out | (case.of_operands(found) if found else {})


@dataclasses.dataclass
class _Joined:
    """The results that the kernels make of dq, dk and dv, and the operands of these, by the names of arrays."""

    gradients: Gradients
    given: dict
    made: dict
    columns: int

    @classmethod
    def of(cls, case, operands):
        gradients, kernel = case.kernel.of_gradients, case.kernel
        shapes = gradients.shapes(case.q.shape, case.v.shape)
        made = {f"store_{i}": np.empty(*x) for i, x in enumerate(zip(shapes, gradients.dtypes, strict=False))}
        tiles = ((kernel.backward.queries, case.q), *((kernel.backward.keys, x) for x in (case.k, case.v)))
        for i, (tile, x) in enumerate(tiles):
            types = Joined.of(gradients, i).reduction_types(x.shape, -(-x.shape[1] // tile) * (tile // 16))
            made |= {f"reduction_{i}_{at}": np.empty(of.shape, of.dtype) for at, of in enumerate(types)}
        given = {f"operand_{i}": np.atleast_1d(x) for i, x in enumerate(operands)}
        widths = [math.prod(x.shape[2:]) for x in (case.q, case.k, case.v)]
        return cls(gradients, given, made, sum(widths[i] for i in Joined.of(gradients, 0).members))

    def point(self, problem, addresses):
        problem.columns = self.columns
        for i, name in enumerate(OF_GRADIENT):
            operands = [addresses[f"operand_{place}"] for place in self.gradients.places[i]]
            reductions = [addresses[x] for x in addresses if x.startswith(f"reduction_{i}_")]
            stores = [addresses[f"store_{at}"] for at in self.gradients.tiles_of(i)]
            pointers = Joined.of(self.gradients, i).pointers(operands, reductions, stores)
            setattr(problem, name, (ctypes.c_void_p * 16)(*pointers))

    def results(self, got):
        """As the primitive has them."""
        reductions = []
        for i in range(3):
            arrays = [jnp.asarray(got[name]) for name in self.made if name.startswith(f"reduction_{i}_")]
            reductions += Joined.of(self.gradients, i).reduced(arrays)
        return [*(got[f"store_{at}"] for at in range(len(self.gradients.dtypes))), *map(np.asarray, reductions)]


IN_FLOAT32 = ("lse", "delta", *(f"gradient_{number}" for number in range(4)))


def run_with_results(case, folder, scalars, schedule=None, fault=None):
    """y (None where it is not kept), lse, stores and maxima as the forward kernel makes them."""
    kernel, (batch, queries, heads, _) = case.kernel, case.q.shape
    library = kernels(kernel, folder, fault)
    y_shape, rows = (batch, queries, heads, kernel.value_head), kernel.forward.rows
    results = results_of(kernel.results, batch * queries, heads * kernel.value_head, kernel.keeps_y)
    words = np.empty((batch, heads, -(-queries // rows) * (rows // 16)), np.float32)
    stores = [np.empty(*x) for x in zip(results.shapes(y_shape), results.dtypes, strict=False)]
    given = [guarded(np.float32(x)) for x in scalars]
    made = [guarded(x, True) for x in (*[words] * len(results.program.reductions), *stores)]
    values = {name: guarded(getattr(case, name)) for name in ("q", "k", "v")}
    values |= {name: guarded(x) for name, x in mask_arrays(case).items()}
    values |= {"y": guarded(np.empty(y_shape, kernel.numpy), True), "claimed": guarded(np.zeros(1, np.int32))}
    values["lse"] = guarded(np.empty((batch, heads, queries), np.float32), True)
    problem = Problem(
        **dict(zip(COUNTS, (batch, queries, case.k.shape[1], heads, case.k.shape[2]), strict=False)),
        left=case.mask.left,
        right=case.mask.right,
        splits=1,
        scale=case.scale,
        schedule=Schedule(1, 0, 0, 0, 1) if schedule is None else schedule,
        **{name: x.ctypes.data for name, (_, x) in values.items()},
        results=(ctypes.c_void_p * 8)(*(x.ctypes.data for _, x in (*given, *made))),
    )
    wrong = library.forward(ctypes.byref(problem)).decode()
    assert not wrong, wrong
    for i, (memory, x) in enumerate((*values.values(), *given, *made)):
        assert is_intact(memory, x), f"something wrote beside array {i}"
    y, lse, count = values["y"][1], values["lse"][1], len(results.program.reductions)
    if not kernel.keeps_y:
        assert (y.view(np.uint8) == 0xFF).all(), "y is stored"
    maxima = [x.max() for _, x in made[:count]]
    return y if kernel.keeps_y else None, lse, [x for _, x in made[count:]], maxima


def formula(case, working, random=None):
    """The results of the textbook's formulas, in float64, or as in the arrays' dtype, summed in float32.

    With a random generator errors of roundings are drawn.
    """
    dtype = np.float32 if working else np.float64
    unit = float(jnp.finfo(case.kernel.numpy).eps)

    def rounded(x):
        if random is not None:
            return (x * (1 + unit * (random.random(x.shape) - 0.5))).astype(dtype)
        return x.astype(case.kernel.numpy).astype(dtype) if working else x

    groups = case.q.shape[2] // case.k.shape[2]
    q, dy = case.q.astype(dtype), case.dy.astype(dtype)
    k, v = (np.repeat(x.astype(dtype), groups, axis=2) for x in (case.k, case.v))
    seen = case.seen
    s = dtype(case.scale) * np.einsum("bthd,bshd->bhts", q, k)
    slope, products = 1, s
    if case.score is not None:
        s, slope = case.scored(s)
    if case.mask.bias is not None:
        s = s + case.mask.bias.astype(dtype)
    s = np.where(seen, s, -np.inf)
    most = np.max(s, axis=-1, keepdims=True)
    sinks = None if case.sinks is None else case.sinks.astype(dtype)[..., None, None]
    most = most if sinks is None else np.maximum(most, sinks)
    most = np.where(np.isneginf(most), 0, most)
    exponentials = np.exp(s - most)
    total = exponentials.sum(-1) + (0 if sinks is None else np.exp(sinks - most)[..., 0])
    with np.errstate(divide="ignore"):
        lse = np.log(total) + most[..., 0]
    p = exponentials / np.where(total == 0, 1, total)[..., None]
    kept = (p * case.dropped).astype(dtype)
    y = np.einsum("bhts,bshd->bthd", rounded(kept), v)
    dp = (np.einsum("bthd,bshd->bhts", dy, v) * case.dropped).astype(dtype)
    delta = np.einsum("bthd,bthd->bht", rounded(y), dy) - case.dlse.astype(dtype)
    delta = np.where(total == 0, 0, delta)
    of_scores = np.where(p == 0, 0, p * (dp - delta[..., None]))
    ds = rounded(np.where(p == 0, 0, of_scores * slope))

    def of_heads(x):
        return x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)

    results = {
        "y": y,
        "lse": lse,
        "dq": dtype(case.scale) * np.einsum("bhts,bshd->bthd", ds, k),
        "dk": dtype(case.scale) * of_heads(np.einsum("bhts,bthd->bshd", ds, q)),
        "dv": of_heads(np.einsum("bhts,bthd->bshd", rounded(kept), dy)),
    }
    if case.sinks is not None:
        results["delta"] = delta
    if case.gradients:
        results |= case.of_scores(products, rounded(of_scores))
    return {name: rounded(x) if working and name not in IN_FLOAT32 else x for name, x in results.items()}


def with_rounding(case, exact, plain):
    """The plain formula's results, with gradients of arrays that err as much as they do in the worst of many draws.

    They are sums whose terms cancel, and few: what one of them errs by is a chance.
    """
    names = [f"gradient_{place}" for place in case.places]
    draws = [formula(case, True, np.random.default_rng(seed)) for seed in range(16 if names else 0)]
    errors = {name: np.max([np.abs(x[name] - exact[name]) for x in (plain, *draws)], axis=0) for name in names}
    return plain | {name: exact[name] + error for name, error in errors.items()}


def check_case(case, folder, **options):
    got, exact = run(case, folder, **options), formula(case, False)
    plain = with_rounding(case, exact, formula(case, True))
    sees = case.seen.any(-1)
    if case.sinks is not None:
        sees = sees | ~np.isneginf(case.sinks)[..., None]
    assert (np.isneginf(got["lse"]) == ~sees).all()
    for results in (got, exact, plain):
        results["lse"] = np.where(sees, results["lse"], 0)
    for name, x in got.items():
        dtype = np.float32 if name in IN_FLOAT32 else case.kernel.numpy
        check(x, exact[name], plain[name], dtype=dtype, name=name)


def spoiled(case, spoils):
    """The case with values that are not finite in rows of its arrays: {array: [(row, value)]}."""
    arrays = {name: getattr(case, name).copy() for name in spoils}
    for name, rows in spoils.items():
        for row, value in rows:
            if name == "dlse":
                arrays[name][:, :, row] = value
            else:
                arrays[name][:, row] = value
    return dataclasses.replace(case, **arrays)


def reached(case, spoils):
    """For each result, the rows (batch, row, heads of queries) that depend on spoiled ones."""
    seen = case.seen

    def rows(name, count):
        is_spoiled = np.zeros(count, bool)
        is_spoiled[[row for row, _ in spoils.get(name, [])]] = True
        return is_spoiled

    queries, keys = seen.shape[2:]
    of_key = (seen & rows("k", keys)).any(-1) | (rows("q", queries) & seen.any(-1))  # probabilities
    of_value = of_key | (seen & rows("v", keys)).any(-1)
    of_slope = of_value | ((rows("dy", queries) | rows("dlse", queries)) & seen.any(-1))
    of_dv = of_key | (rows("dy", queries) & seen.any(-1))

    def seen_by(of):
        return (seen & of[..., None]).any(2)

    return {
        "y": of_value,
        "lse": of_key,
        "dq": of_slope,
        "dk": seen_by(of_slope),
        "dv": seen_by(of_dv),
        "delta": of_slope,
    }


def bits(x):
    return np.ascontiguousarray(x).view(np.uint16 if x.itemsize == 2 else np.uint32)


def check_spoiled(case, folder, spoils, **options):
    """Rows that do not depend on spoiled ones are bit for bit those without them; others are not finite.

    Others of the same document may be NaN too: a mark is that of a whole row.
    """
    clean, got = run(case, folder), run(spoiled(case, spoils), folder, **options)
    must = reached(case, spoils)
    everything = {name: [row for rows in spoils.values() for row in rows] for name in ("q", "k", "v", "dy", "dlse")}
    may = reached(case, everything)
    groups = case.q.shape[2] // case.k.shape[2]
    for name, x in got.items():
        is_bad, same = ~np.isfinite(x.astype(np.float32)), bits(x) == bits(clean[name])
        same = same | (x == 0) & (clean[name] == 0)  # of a row whose probabilities are all dropped: the sign of 0
        if name not in IN_FLOAT32:
            is_bad, same = is_bad.swapaxes(1, 2), same.swapaxes(1, 2)
        else:
            is_bad, same = is_bad[..., None], same[..., None]
            same = same | np.isneginf(clean["lse"])[..., None] & np.isneginf(x)[..., None]
            is_bad = is_bad & ~np.isneginf(clean["lse"])[..., None]
        if name in ("dk", "dv"):
            must[name], may[name] = (of[name].reshape(len(x), -1, groups, x.shape[1]).any(2) for of in (must, may))
        assert must[name].any() or name in ("y", "lse", "dv"), name
        assert is_bad.all(-1)[must[name]].all(), f"{name}: a row that depends on spoiled ones is finite"
        assert same.all(-1)[~may[name]].all(), f"{name}: another document has changed"
