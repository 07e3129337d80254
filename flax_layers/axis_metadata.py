"""Names of axes as metadata: `axis_names` of an nnx.Param, and the box in which linen keeps a variable.

    module.attention.qkv.kernel.axis_names                        # ("embed", "heads")
    variables["params"]["attention"]["qkv"]["kernel"].names       # the same, and "layers" where nn.scan stacks them

flax shards an nnx.Variable with `out_sharding` when it is made, and raises without a mesh. So names have a key of their
own, which flax does not look at: a model is made and trained with them as without, under any mesh. Where flax's nnx
transformations are to keep them, `transform_metadata={nnx.PARTITION_NAME: "layers", "axis_names": "layers"}` says so.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax import linen as nn
from flax import nnx, serialization
from flax.core import meta

from flax_layers.axis_names import METADATA, Axes, Name, axes_of_parameter, first_name
from flax_layers.sharding import spec_of

T = TypeVar("T")


class NamedAxes(nn.LogicallyPartitioned):
    """A linen variable with the names of its axes: what flax's logical partitioning reads, and otherwise the array.

    `nn.get_partition_spec` gives its names, the first where an axis has several, as `nn.logical_to_mesh` reads them.
    Indexing, arithmetic, attributes and NumPy's and JAX's functions are those of the array, and so is what
    `flax.serialization` writes and reads. `nn.meta.unbox` returns the array, and constrains nothing.

    Attributes:
      value: the array.
      names: of its axes, in order.
    """

    def unbox(self, apply_constraint: bool = True) -> Any:
        return self.value

    def get_partition_spec(self) -> jax.P:
        return jax.P(*map(first_name, self.names))

    def get_sharding(self, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
        """The variable's sharding by the rules in force."""
        return jax.sharding.NamedSharding(mesh, spec_of(self.names, mesh=mesh, shape=self.value.shape))

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> NamedAxes:
        """The box with the name that `metadata_params` of nn.scan or nn.vmap gives the new axis; default "layers"."""
        at = index % (len(self.names) + 1)
        added: NamedAxes = self.replace(names=(*self.names[:at], _name_of_stack(params), *self.names[at:]))
        return added

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> NamedAxes:
        """The box without the axis's name, if it is the one of `metadata_params`: names of one layer's axes stay."""
        at = index % max(len(self.names), 1)
        if self.names[at : at + 1] != (_name_of_stack(params),):
            return self
        removed: NamedAxes = self.replace(names=self.names[:at] + self.names[at + 1 :])
        return removed

    def to_nnx_metadata(self) -> dict[str, Any]:
        return {"value": self.value, METADATA: self.names}

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> NamedAxes:
        return cls(metadata["value"], metadata[METADATA])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "value":
            raise AttributeError(name)
        return getattr(self.value, name)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "a linen variable is not written into while it is in its box: give the nnx module the arrays, "
            "nnx.update(module, nn.meta.unbox(variables['params']))"
        )

    def __jax_array__(self) -> jax.Array:
        array: jax.Array = self.value
        return array

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return self.value.__array__(*arguments, **options)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Any:
        return iter(self.value)

    def __eq__(self, other: object) -> Any:
        return self.value == meta.unbox(other)


def _name_of_stack(params: Mapping[Any, Any]) -> Any:
    return params.get(nn.PARTITION_NAME, "layers")


def _forwarded(function: Any, *, reflected: bool = False) -> Any:
    def method(self: NamedAxes, *others: Any) -> Any:
        operands = (self.value, *map(meta.unbox, others))
        return function(*(operands[::-1] if reflected else operands))

    return method


for _operation in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(NamedAxes, f"__{_operation}__", _forwarded(getattr(operator, _operation)))
    setattr(NamedAxes, f"__r{_operation}__", _forwarded(getattr(operator, _operation), reflected=True))
for _operation in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "ne"):
    setattr(NamedAxes, f"__{_operation}__", _forwarded(getattr(operator, _operation)))
for _type in (float, int, bool):
    setattr(NamedAxes, f"__{_type.__name__}__", _forwarded(_type))

serialization.register_serialization_state(
    NamedAxes,
    lambda box: serialization.to_state_dict(box.value),
    lambda box, state: box.replace(value=serialization.from_state_dict(box.value, state)),
    override=True,
)


def parameter(value: Any, *names: Name) -> nnx.Param[Any]:
    """An nnx.Param of an initialiser's result, with the names of its axes.

    Args:
      value: an array, or one with metadata as `nnx.with_partitioning` gives it, of which flax reads the sharding.
      *names: of the axes, see `flax_layers.axis_names`.
    """
    param: nnx.Param[Any] = nnx.Param(value)
    _name(param, names)
    return param


def name_parameters(module: nnx.Module, more: Mapping[str, Axes] | None = None) -> None:
    """Gives every nnx.Param of a module the names of its axes that its path has, in place, if it has none.

    A linen variable that `nnx.update` left in its box is taken out of it.

    Args:
      module: as it is at the end of its `__init__`.
      more: names of your own parameters by the end of their path, as {"router.kernel": ("embed", None)}; they replace
        names that a parameter has.
    """
    for path, param in nnx.iter_graph(module):
        if not isinstance(param, nnx.Param) or not hasattr(value := param.get_value(), "ndim"):
            continue
        if isinstance(value, NamedAxes):
            param.set_raw_value(value.value)
        named = param.get_metadata(METADATA, None)
        known = axes_of_parameter([*map(str, path)], value.ndim, more, named)
        if known is not None and known.axes != named and not (known.is_guess and named):
            _name(param, known.axes)


def name_stack(module: T) -> T:
    """The module, made of equal ones whose arrays are stacked along a first axis, with that axis named "layers"."""
    for param, names in _named(module):
        param.set_metadata(METADATA, ("layers", *names))
    return module


def name_layer(module: T) -> T:
    """The module, one of a stack, whose arrays no longer have the stack's first axis."""
    for param, names in _named(module):
        if names[:1] == ("layers",):
            param.set_metadata(METADATA, names[1:])
    return module


def _named(module: Any) -> Iterator[tuple[nnx.Param[Any], Axes]]:
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param) and (names := param.get_metadata(METADATA, None)) is not None:
            yield param, names


def _name(param: nnx.Param[Any], names: Axes) -> None:
    metadata: dict[str, Any] = {METADATA: names}
    if not param.has_metadata("out_sharding") and not param.has_metadata("linen_meta_type"):
        metadata["linen_meta_type"] = NamedAxes
    param.set_metadata(**metadata)
