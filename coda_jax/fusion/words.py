"""The words for what maps and calls compute, as a user would say: bias, gelu, dropout, residual, rms sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.fusion.alike import is_attention
from coda_jax.fusion.dots import Equation, is_dot
from coda_jax.fusion.straight import is_opaque, is_stacked, name_of_opaque
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.walk import equations, inner_jaxprs

_GELU = 0.044715, math.sqrt(2 / math.pi)  # in the form with tanh
_NOTHING = {
    *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "name", "iota", "pvary"),
    *("transpose", "stop_gradient", "sharding_constraint", "reshard", "layout_constraint", "reduce_precision", "neg"),
    *("and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge", "optimization_barrier", "add_any", "is_finite", "sign"),
}
_SAME = {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "name"}
_BITS = {"xor", "shift_right_logical", "shift_left", "shift_right_arithmetic", "random_bits"}
_RANDOM = ("random_", "threefry2x32", "rng_")
_WORDS = {
    "erf": "gelu",
    "erfc": "gelu",
    "logistic": "sigmoid",
    "log1p": "softplus",
    "rsqrt": "norm",
    "integer_pow": "square",
    "square": "square",
    "clamp": "clip",
    "concatenate": "joined columns",
    "sort": "sort",
    "reduce_max": "row maximum",
    "reduce_min": "row minimum",
    "split": "split columns",
}
_OF_VECTORS = {"rsqrt", "reduce_sum", "reduce_max", "reduce_min"}  # words for what has no columns
_OF_ROTATIONS = {"split columns", "joined columns", "slice", "gate", "scale", "residual", "difference", "row scale"}
_OF_NOTHING = {
    "mul": "scale",
    "div": "scale",
    "add_any": "add",
    "convert_element_type": "cast",
    "broadcast_in_dim": "cast",
}
# The words of calls, by how the names of their equations begin; the first that fits.
_OF_CALLS: Sequence[tuple[Sequence[str], str]] = (
    (_RANDOM, "random numbers"),
    (("scan", "while"), "loop"),
    (("cond",), "branches"),
    (("shard_map",), "shard_map"),
    (("checkpoint", "remat"), "checkpoint"),
    (("conv_general_dilated",), "convolution"),
    (("gather", "dynamic_slice"), "gather"),
    (("scatter", "dynamic_update_slice"), "scatter"),
    (("sort", "top_k", "argmax", "argmin", "cum"), "ranks along an axis"),
    (("psum", "all_gather", "all_to_all", "ppermute", "reduce_scatter"), "collectives"),
    (("rsqrt",), "norm"),
    (("exp", "reduce_max"), "softmax"),
    (("reduce_",), "sums"),
    (("concatenate", "transpose", "pad", "slice", "split", "rev"), "copies"),
)


def words_of_map(
    steps: Sequence[Equation], is_tile: Callable[[Any], bool], drawn: Collection[Any] = frozenset()
) -> str:
    """The words for the equations of a map: "bias+gelu".

    Args:
      steps: the equations, in order.
      is_tile: whether a variable has rows and columns.
      drawn: the variables of other equations that are made of random numbers.
    """
    words = _Words(is_tile, drawn)
    for equation in steps:
        words.add(equation)
    found = words.found
    names = {equation.primitive.name for equation in steps}
    if {"concatenate", "mul"} <= names and not names.isdisjoint(("slice", "split")):
        found = ["rotation of heads", *(x for x in found if x not in _OF_ROTATIONS)]
    if "norm" in found:
        norm = "layer norm" if "centred" in found else "rms norm"
        found = [norm if x == "norm" else x for x in found if x not in ("centred", "row scale", "scale")]
    last = steps[-1].primitive.name
    return "+".join(dict.fromkeys(found)) or _OF_NOTHING.get(last, last)


def words_of_call(steps: Sequence[Equation]) -> str:
    """The word for the equations that stay XLA's: "gather", or a function's name, "'attention'"."""
    if name := _names_of_functions(steps):
        return name
    every = [e for step in steps for e in (step, *(x for body in inner_jaxprs(step) for x, _ in equations(body)))]
    outer = ["scan" if is_stacked(step) else step.primitive.name for step in steps]
    if name := next((x for x in outer if x in CUSTOM_DERIVATIVES - {"custom_jvp_call"}), ""):
        return name.removesuffix("_call")
    dots = [e for e in every if is_dot(e)]
    loops = {"scan", "while", "cond", "shard_map", "checkpoint", "remat", "remat2"}
    if dots and loops.isdisjoint(outer):
        return "attention" if any(e.params["dimension_numbers"][1][0] for e in dots) else "products"
    names = outer if not loops.isdisjoint(outer) else [e.primitive.name for e in every]
    for starts, word in _OF_CALLS:
        if any(name.startswith(tuple(starts)) for name in names):
            return word
    telling = dict.fromkeys(name for name in names if name not in _NOTHING)
    return "+".join(telling) or "casts and copies"


def _names_of_functions(steps: Sequence[Equation]) -> str:
    """The names of the functions that are called as they are: of attention, and of the user's opaque ones."""
    names = ["attention" for _ in filter(is_attention, steps)]
    names += map(name_of_opaque, filter(is_opaque, steps))
    return "+".join(dict.fromkeys(f"'{name}'" for name in names if name))


class _Words:
    """The words for equations, and what their variables are made of.

    Attributes:
      found: the words, in order.
    """

    def __init__(self, is_tile: Callable[[Any], bool], drawn: Collection[Any]):
        self.found: list[str] = []
        self._is_tile = is_tile
        self._makers: dict[Any, Equation] = {}
        self._tiles: dict[Any, frozenset[Any]] = {}  # the tiles among the map's inputs that a variable is made of
        self._has_bits = set(drawn)  # variables that are made of random bits

    def add(self, equation: Equation) -> None:
        """Takes the next equation into account."""
        inputs = variables(equation.invars)
        if equation.primitive.name in _BITS or not self._has_bits.isdisjoint(inputs):
            self._has_bits |= set(equation.outvars)
        word = self._word(equation)
        self.found += [word] if word else []
        tiles = frozenset[Any]().union(*map(self._tiles_of, inputs))
        # A mean of rows is a vector, whatever it is made of.
        self._tiles |= {x: tiles if self._is_tile(x) else frozenset() for x in equation.outvars}
        self._makers |= dict.fromkeys(equation.outvars, equation)

    def _tiles_of(self, x: Any) -> frozenset[Any]:
        if isinstance(x, core.Literal):
            return frozenset()
        return self._tiles[x] if x in self._tiles else frozenset({x} if self._is_tile(x) else ())

    def _root(self, x: Any) -> Any:
        """The variable, or the number, without casts and changes of shape."""
        while not isinstance(x, core.Literal) and x in self._makers and self._makers[x].primitive.name in _SAME:
            x = self._makers[x].invars[0]
        return x

    def _word(self, equation: Equation) -> str:
        name, of = equation.primitive.name, [self._root(x) for x in equation.invars]
        if name in _BITS or name in _NOTHING or np.dtype(equation.outvars[0].aval.dtype).kind in "iu":
            return ""
        if name in CALLS | CUSTOM_DERIVATIVES:
            return _name_of_call(equation)
        if name in ("add", "sub", "mul", "div"):
            return self._of_two(name, of, equation.invars)
        if name not in _OF_VECTORS and not any(map(self._is_tile, equation.outvars)):
            return ""
        if name in ("max", "min"):
            return "relu" if any(_number(x) == 0 for x in of) else name
        if name == "select_n":
            return "dropout" if of[0] in self._has_bits else "mask"
        if name == "reduce_sum":
            return self._of_sum(of[0])
        if name == "tanh":
            is_gelu = any(map(_is_of_gelu, self._makers.values()))
            self.found = [x for x in self.found if not (is_gelu and x == "power")]  # of its argument
            return "gelu" if is_gelu else "tanh"
        if name == "integer_pow" and equation.params["y"] != 2:
            return "power"
        return _WORDS.get(name, name)

    def _of_two(self, name: str, of: Sequence[Any], in_shape: Sequence[Any]) -> str:
        """The word for a sum, a difference, a product or a quotient; of variables, and of these as they are shaped."""
        first, second = map(self._tiles_of, of)
        if first and second:
            is_apart = first.isdisjoint(second)
            if name == "mul" and of[0] is of[1]:
                return "square"
            if name == "mul" and any(self._is_made_by(x, "logistic") for x in of) and not is_apart:
                self.found = [x for x in self.found if x != "sigmoid"]
                return "silu"
            return {"add": "residual", "sub": "difference", "mul": "gate", "div": "quotient"}[name] if is_apart else ""
        vector = next((x for x, tiles in zip(of, (first, second), strict=True) if not tiles), None)
        if vector is None or isinstance(vector, core.Literal) or not (first or second) or _size(vector) == 1:
            return ""
        is_of_rows = next(x for x, one in zip(in_shape, of, strict=True) if one is vector).aval.shape[-1:] == (1,)
        if name in ("add", "sub"):
            return ("centred" if name == "sub" else "row shift") if is_of_rows else "bias"
        return "row scale" if is_of_rows else "scale"

    def _of_sum(self, x: Any) -> str:
        is_square = any(self._is_made_by(x, name) for name in ("mul", "square", "integer_pow"))
        if not is_square or self.found[-1:] != ["square"]:
            return "sum"
        self.found.pop()
        return "rms sum"

    def _is_made_by(self, x: Any, name: str) -> bool:
        return not isinstance(x, core.Literal) and x in self._makers and self._makers[x].primitive.name == name


def _name_of_call(equation: Equation) -> str:
    """The name of a function with a derivative of its own, as relu."""
    inner = opened(callee(equation))[0]
    names = [str(x.params["name"]) for x in inner.eqns if "name" in x.params]
    name = next(iter(names), getattr(getattr(inner, "debug_info", None), "func_name", "") or "function")
    return name.strip("_<>")


def _number(x: Any) -> Any:
    return float(x.val) if isinstance(x, core.Literal) and np.ndim(x.val) == 0 else None


def _size(x: Any) -> Any:
    return math.prod(x.aval.shape)


def _is_of_gelu(equation: Equation) -> bool:
    """True for a product with a factor of the form of gelu with tanh, which may be rounded to 16 bits."""
    numbers = [value for x in equation.invars if (value := _number(x)) is not None]
    return equation.primitive.name == "mul" and any(abs(x - y) < 0.01 * y for x in numbers for y in _GELU)
