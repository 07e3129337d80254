"""The sharding of a model on a mesh: names of axes, rules that give mesh axes to names, and what follows from both.

    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = sharding.create(lambda: Llama(config, rules=sharding.FSDP_TENSOR, rngs=nnx.Rngs(0)))
        tokens = jax.device_put(tokens, sharding.array_sharding(mesh, model.rules, "batch", "length"))

**Names.** Every axis of a parameter and of an activation has a name: `flax_layers.axis_names` lists them. Names depend
on the model alone, so that a plan for a mesh is a small dictionary beside it, and changing it changes no model code.
Parameters have theirs as metadata, in linen too: `flax_layers.axis_metadata`. MaxText's rules are read as they are.

**Rules** say which mesh axes shard the axes of a name, as flax's logical axis rules do: {"embed": "fsdp"}, or several
mesh axes, the major one first. An axis without a rule is not sharded. A mesh axis shards an array once: where two of an
array's names ask for it, the name that comes first in the rules has it. So {"batch": "fsdp", "embed": "fsdp"} shards
the residual stream (batch, length, embed) by its batch and a kernel (embed, mlp) by its rows. With "length": "tensor"
after "mlp": "tensor" the residual stream is sharded by its length, the hidden activation (batch, length, mlp) by mlp.
Mesh axes that the mesh does not have are skipped: one set of rules serves a node and a cluster. Where a mesh axis does
not divide a parameter's axis evenly, a later name has it: of `down` (mlp and fan_in, embed) that is embed. An
activation, which has "batch" or "length" among its names, is then not sharded by it: see `spec_of`.

**Where rules act.** `Llama(config, rules=...)` keeps them, and they are in force for all its layers while it is traced.
They may also come from a `with nnx.logical_axis_rules(...)` inside the jitted function: for blocks without a model, and
for your own models, whose arrays `constrain` names. Without rules, and without a mesh (`jax.set_mesh`), nothing is
constrained and nothing else changes.

    parameters    `create` makes each device's shard on that device; `parameter_specs` gives the PartitionSpec of each,
                  also of gradients and optimizer states; in the backward pass gradients are sharded as their parameters
    activations   the residual stream between sub-layers, query, key, value and context, the hidden activation of the
                  feed-forward layers and the head's input are constrained, and so are the cotangents of all of these.
                  Constraints are XLA's on automatic mesh axes, reshards on explicit ones

Constraints enforce the textbook plan. Without them XLA's propagation may shard the residual stream by D, as the
embedding, or by the batch a hidden activation that tensor parallelism shards by F; either costs an all-to-all, or a
gather of activations, in every layer.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from flax.linen import LogicallyPartitioned
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from coda_jax.extend import constrained
from flax_layers.axis_names import MAXTEXT, METADATA, Axes, Name, axes_of_parameter, module_of_parameter
from flax_layers.sharding_plans import DATA as DATA
from flax_layers.sharding_plans import EXPERT as EXPERT
from flax_layers.sharding_plans import FSDP as FSDP
from flax_layers.sharding_plans import FSDP_SEQUENCE as FSDP_SEQUENCE
from flax_layers.sharding_plans import FSDP_TENSOR as FSDP_TENSOR
from flax_layers.sharding_plans import SEQUENCE as SEQUENCE
from flax_layers.sharding_plans import TENSOR as TENSOR
from flax_layers.sharding_plans import MeshAxes as MeshAxes
from flax_layers.sharding_plans import Plan as Plan

Rules = Mapping[str, MeshAxes] | Sequence[tuple[str, MeshAxes]]
Pairs = tuple[tuple[str, MeshAxes], ...]

STREAM: Axes = ("batch", "length", "embed")  # the residual stream
_ACTIVATION_AXES = {"batch", "length"}

T = TypeVar("T")


def normalized(rules: Rules | None) -> Pairs | None:
    """The rules as flax has them, a hashable tuple of pairs; MaxText's with our names of activations.

    Raises:
      ValueError: they do not give names mesh axes.
    """
    if rules is None:
        return None
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    checked = []
    for pair in pairs:
        name, axes = pair
        axes = tuple(axes) if isinstance(axes, list) else axes
        are_names = isinstance(axes, str | tuple | None) and all(isinstance(axis, str) for axis in _names(axes))
        if not isinstance(name, str) or not are_names:
            raise ValueError(f"rules give names of axes the names of mesh axes; got {name!r}: {axes!r}")
        checked.append((name, axes))
    return _in_our_names(tuple(checked))


@contextlib.contextmanager
def axis_rules(rules: Rules | None) -> Iterator[None]:
    """`nnx.logical_axis_rules` of these; with None the rules in force stay."""
    pairs = normalized(rules)
    with contextlib.nullcontext() if pairs is None else spmd.logical_axis_rules(pairs):
        yield


def spec_of(
    axes: Axes, rules: Rules | None = None, *, mesh: Any = None, shape: Sequence[Any] | None = None
) -> PartitionSpec:
    """The sharding of an array whose axes have these names.

    Args:
      axes: names, each one, several or None for an axis that is not sharded.
      rules: default those in force.
      mesh: whose axes are meant; default that of `jax.set_mesh`, and without one all that the rules name.
      shape: the array's, None for an axis of unknown size. Mesh axes that do not divide an axis evenly do not shard it.
        A later name has them, unless "batch" or "length" is among the names.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    sizes = None if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    sharded_by: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    kept_for: dict[str, str] = {}  # the name that a mesh axis is for, whether it divides the name's axis or not
    is_activation = any(name in _ACTIVATION_AXES for names in axes for name in _names(names))
    for name, mesh_axes in normalized(rules) or _rules_in_force():
        at = next((i for i, names in enumerate(axes) if name in _names(names)), None)
        if at is None or sharded_by.get(name):
            continue
        beside = tuple(axis for other in _names(axes[at]) for axis in sharded_by.get(other, ()))
        free = [axis for axis in _names(mesh_axes) if axis not in taken and kept_for.get(axis, name) == name]
        sharded_by[name] = _fitting(free, beside, None if shape is None else shape[at], sizes)
        taken.update(sharded_by[name])
        if is_activation:
            kept_for = dict.fromkeys(_names(mesh_axes), name) | kept_for
    entries = (tuple(axis for name in _names(names) for axis in sharded_by.get(name, ())) for names in axes)
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def constrain(x: jax.Array, *axes: Name, beside: Axes = (), beside_shape: Sequence[Any] | None = None) -> jax.Array:
    """x, sharded as the rules in force say for axes with these names, and so is its cotangent.

    Args:
      x: an array. One with fewer axes lacks the first ones, whose mesh axes then shard nothing.
      *axes: names.
      beside: names of axes of an array that x is multiplied with or looked up by. x is not sharded by a mesh axis that
        would shard one of these, in an array with these axes and x's.
      beside_shape: the sizes of these axes, None for one that any mesh axis may shard; default None for all.

    Raises:
      ValueError: "length" would be sharded by an explicit mesh axis.
    """
    return constrained(x, activation_spec(jnp.shape(x), *axes, beside=beside, beside_shape=beside_shape))


def constrain_parameters(module: T) -> T:
    """The module with its parameters as `constrain` returns them, by their names: their gradients are sharded alike.

    Under rules it is a copy: what the module writes into variables of its own is lost.
    """
    if not _in_force():
        return module
    split: Any = nnx.split(module, nnx.Param, ...)
    graphdef, params, rest = split

    def one(path: Sequence[str | int], x: jax.Array, metadata: Axes | None) -> jax.Array:
        known = axes_of_parameter(path, x.ndim, metadata=metadata)
        return x if known is None else constrain(x, *known.axes)

    result: T = nnx.merge(graphdef, map_named(one, params), rest)
    return result


def activation_spec(
    shape: Sequence[Any], *axes: Name, beside: Axes = (), beside_shape: Sequence[Any] | None = None
) -> PartitionSpec | None:
    """The spec by which `constrain` shards an array of this shape; None where no rules are in force, or no mesh is."""
    if not _in_force():
        return None
    lacking = (None,) * (len(beside) + len(axes) - len(shape))
    names = (*beside, *axes)
    sizes = (*lacking, *shape) if beside_shape is None else (*beside_shape, *lacking[len(beside) :], *shape)
    entries = tuple(spec_of(names, shape=sizes))
    length_entries = (entry for name, entry in zip(names, entries, strict=True) if "length" in _names(name))
    if explicit := {axis for axis in mesh_axes(length_entries) if _size(axis) > 1} & _explicit_axes():
        raise ValueError(
            f"the rules cut 'length' by {', '.join(sorted(explicit))}, an explicit mesh axis: sequence parallelism is "
            "for automatic ones, axis_types=(jax.sharding.AxisType.Auto, ...)"
        )
    return PartitionSpec(*entries[len(lacking) :])


def width_is_cut() -> bool:
    """Whether the rules in force shard kernels along the model's width, as FSDP's do: products then gather them."""
    return bool(_axes_of_width())


def keeps_weights() -> bool:
    """Whether operators keep gathered weights (`keep_weights`): where automatic mesh axes shard the width."""
    return bool(_axes_of_width() - _explicit_axes())


def mesh_axes(spec: Iterable[MeshAxes]) -> tuple[str, ...]:
    """All mesh axes of a PartitionSpec, or of some of its entries."""
    return tuple(axis for entry in spec for axis in _names(entry))


def array_sharding(mesh: Any, rules: Rules | None, *axes: Name) -> NamedSharding:
    """The sharding of an array whose axes have these names, as tokens ("batch", "length")."""
    return NamedSharding(mesh, spec_of(axes, rules or (), mesh=mesh))


def parameter_specs(
    model: Any, rules: Rules | None = None, *, mesh: Any = None, axes: Mapping[str, Axes] | None = None
) -> Any:
    """The PartitionSpec of every array of a model, or of a tree of its structure.

    Args:
      model: a module, abstract as of `nnx.eval_shape` or not; or a pytree whose keys end as a model's do: an nnx.State,
        gradients, an optimizer's state, linen's variables. Names in metadata say where the axis of stacked layers is,
        also in `nn.LogicallyPartitioned` of other modules; without them it is the first one.
      rules: default the model's own, then those in force.
      mesh: default that of `jax.set_mesh`.
      axes: names of your own parameters by the end of their path, {"router.kernel": ("embed", None)}; see
        `flax_layers.axis_names`.

    Returns:
      The structure of `nnx.state(model)`, or of the pytree.

    Raises:
      ValueError: a parameter of two or more axes without names; one that its mesh axes do not divide evenly, along any
        axis whose names ask for them; or parameters of a module that cannot be stacked along their first axis.
    """
    tree = nnx.state(model) if isinstance(model, nnx.Module) else model
    rules = getattr(model, "rules", None) if rules is None else rules
    rules = spmd.get_logical_axis_rules() if rules is None else rules
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh

    stacks: dict[tuple[str, ...], tuple[str, tuple[int, ...], dict[Name, int]]] = {}

    def spec(path: Sequence[str | int], x: Any, metadata: Axes | None) -> PartitionSpec:
        known = axes_of_parameter(path, x.ndim, axes, metadata)
        if known is None:
            if x.ndim < 2:
                return PartitionSpec()  # counts, keys, an optimizer's vectors of rows
            end = ".".join(_dotted(path).split(".")[-2:])
            raise ValueError(f"{_dotted(path)} of shape {x.shape} has no names of axes: give axes={{{end!r}: (...)}}")
        if known.is_guess:
            _check_stack(stacks, path, x.shape, known.axes)
        full_spec, fitting_spec = (spec_of(known.axes, rules, mesh=mesh, shape=shape) for shape in (None, x.shape))
        if set(mesh_axes(full_spec)) != set(mesh_axes(fitting_spec)):
            _check_divides(_dotted(path), x.shape, known.axes, full_spec, mesh)
        return fitting_spec

    return map_named(spec, tree)


def parameter_shardings(model: Any, mesh: Any, rules: Rules | None = None, **options: Any) -> Any:
    """The NamedSharding of every array; arguments as in `parameter_specs`."""
    specs = parameter_specs(model, rules, mesh=mesh, **options)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def create(make: Callable[[], T], rules: Rules | None = None, *, mesh: Any = None, **options: Any) -> T:
    """make(), with each shard of its arrays made on its own device: no device ever holds all of them.

    The values are those of make() itself.

    Args:
      make: returns a module, and reads no array from outside.
      rules: default the module's own, then those in force.
      mesh: default that of `jax.set_mesh`.
      **options: of `parameter_specs`.

    Raises:
      ValueError: no mesh, or as in `parameter_specs`.
    """
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    if mesh.empty:
        raise ValueError("create wants a mesh: give mesh=, or call it under jax.set_mesh(mesh)")
    # On explicit axes the types of drawn arrays would be replicated.
    automatic = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    with jax.set_mesh(automatic):
        abstract: Any = nnx.eval_shape(make)
        graphdef, _ = nnx.split(abstract)
        shardings = parameter_shardings(abstract, automatic, rules, **options)
        state = jax.jit(lambda: nnx.state(make()), out_shardings=shardings)()
    state = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), state)
    result: T = nnx.merge(graphdef, state)
    return result


def _rules_in_force() -> Pairs:
    pairs = spmd.get_logical_axis_rules()
    return _in_our_names(tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs))


@functools.lru_cache
def _in_our_names(rules: Pairs) -> Pairs:
    """MaxText's rules after their rules of activations in our names; other rules as they are."""
    if not any(name == MAXTEXT["batch"] for name, _ in rules) or any(name in MAXTEXT for name, _ in rules):
        return rules
    return (*((ours, axes) for ours, theirs in MAXTEXT.items() for name, axes in rules if name == theirs), *rules)


def _in_force() -> bool:
    return bool(spmd.get_logical_axis_rules()) and not jax.sharding.get_abstract_mesh().empty


def _axes_of_width() -> set[str]:
    return set(mesh_axes(spec_of(("embed",)))) if _in_force() else set()


def _size(axis: str) -> int:
    return jax.sharding.get_abstract_mesh().shape[axis]


def _explicit_axes() -> set[str]:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind is AxisType.Explicit}


def _names(axes: MeshAxes) -> tuple[Any, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _fitting(axes: Sequence[str], beside: Sequence[str], size: Any, sizes: Mapping[str, int] | None) -> tuple[str, ...]:
    """The first of these mesh axes that a mesh of these sizes has and that divide a size evenly after `beside`."""
    fitting: tuple[str, ...] = ()
    for axis in axes:
        if sizes is not None and axis not in sizes:
            continue
        if size is not None and sizes is not None and not _divides((*beside, *fitting, axis), size, sizes):
            break
        fitting += (axis,)
    return fitting


def _divides(axes: Sequence[str], size: Any, sizes: Mapping[str, int]) -> bool:
    return isinstance(size, int) and size % math.prod(sizes[axis] for axis in axes) == 0


def map_named(function: Callable[[Sequence[str | int], Any, Axes | None], Any], tree: Any) -> Any:
    """function(path, array, names of its axes by metadata or None) for every array of a tree."""

    def named(x: Any) -> bool:
        return isinstance(x, nnx.Variable | LogicallyPartitioned)

    def on_named(path: Any, x: Any) -> Any:
        names = x.names if isinstance(x, LogicallyPartitioned) else None
        names = x.get_metadata(METADATA, None) if isinstance(x, nnx.Variable) else names
        return jax.tree_util.tree_map_with_path(
            lambda inner, leaf: function([_key(key) for key in (*path, *inner)], leaf, names), x
        )

    return jax.tree_util.tree_map_with_path(on_named, tree, is_leaf=named)


def _check_stack(
    stacks: dict[tuple[str, ...], tuple[str, tuple[int, ...], dict[Name, int]]],
    path: Sequence[str | int],
    shape: tuple[int, ...],
    axes: Axes,
) -> None:
    """Checks the guess that layers are stacked along the first axis: all parameters of a module then agree in sizes.

    Args:
      stacks: for each module seen so far a parameter's name, its shape and its sizes.
    """
    sizes: dict[Name, int] = {name: size for name, size in zip(axes, shape, strict=True) if name in ("layers", "embed")}
    other, other_shape, seen = stacks.setdefault(module_of_parameter(path), (_dotted(path), shape, sizes))
    if any(seen.get(name, size) != size for name, size in sizes.items()):
        raise ValueError(
            f"{_dotted(path)} of shape {shape} and {other} of shape {other_shape} have one axis more than names. It "
            "cannot be the first one, of stacked layers, for then their sizes of 'layers' or of 'embed' differ. Give "
            "the variables as linen makes them, before nn.unbox, whose names say where layers are; or "
            f"axes={{{'.'.join(_dotted(path).split('.')[-2:])!r}: (...)}} with 'layers' in its place"
        )
    seen.update(sizes)


def _check_divides(name: str, shape: Sequence[int], axes: Axes, spec: PartitionSpec, mesh: Any) -> None:
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    for names, size, entry in zip(axes, shape, spec, strict=True):
        if sizes and entry is not None and not _divides(_names(entry), size, sizes):
            by = " x ".join(f"{one}={sizes[one]}" for one in _names(entry))
            axis = " and ".join(map(repr, _names(names)))
            raise ValueError(
                f"{name} has shape {tuple(shape)}, whose axis {axis} of {size} mesh axes {by} do not divide evenly: "
                f"change its size, or give {axis} other mesh axes or None in the rules"
            )


def _key(key: Any) -> str | int:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            value: str | int = getattr(key, attribute)
            return value
    return str(key)


def _dotted(keys: Sequence[str | int]) -> str:
    return ".".join(str(key) for key in (keys[:-1] if keys and keys[-1] == "value" else keys))
