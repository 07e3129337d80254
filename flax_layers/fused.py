"""Layers under `coda.fuse`: each is a formula on arrays, fused by itself, or with the function that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import flax
from flax.core import spmd

import coda_jax as coda
from coda_jax.extend import hide_frames, is_fused
from flax_layers.sharding import axis_rules, normalized

Method = TypeVar("Method", bound=Callable[..., Any])

for library in (__file__, flax.__file__):  # a warning names the line that called the layer, or the model
    hide_frames(library)


def fused(method: Method) -> Method:
    """A layer's method under `coda.fuse`: in a fused block, model or loss it is a part of that, as if written there."""
    return _with_rules(method, inlines=True)


def fused_whole(method: Method) -> Method:
    """A block's or model's method under `coda.fuse`; in a larger fused function equal blocks are one, traced once."""
    return _with_rules(method, inlines=False)


def _with_rules(method: Method, *, inlines: bool) -> Method:
    """The method, traced anew for other sharding rules in force, by which its arrays lie."""

    @functools.wraps(method)
    def under_rules(self: Any, args: Any, options: Any, rules: Any) -> Any:
        with axis_rules(rules):
            return method(self, *args, **options)

    part, alone = coda.fuse(under_rules), coda.fuse(under_rules, memory=None)

    @functools.wraps(method)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        if inlines and is_fused():
            return method(self, *args, **options)
        function = part if is_fused() else alone  # a part has the options of the whole
        return function(self, args, options, normalized(spmd.get_logical_axis_rules()))

    return cast(Method, called)
