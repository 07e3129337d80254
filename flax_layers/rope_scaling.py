"""Angles of the rotary embedding, and frequencies stretched for longer contexts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flax_layers.config_checks import (
    check_flags,
    check_not_negative,
    check_positive,
    check_positive_argument,
    is_number,
)


def rotary_frequencies(size: int, theta: float) -> jax.Array:
    """theta ** (-2 i / size), (size / 2,) float32, in radians a position."""
    return theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """How rotary frequencies are stretched: one class for each of Hugging Face's `rope_type`s, with its names.

    Attributes:
      rope_type: Hugging Face's name.
      needs_length: whether frequencies depend on how long a text is.

    Raises:
      TypeError: this class itself, which has no frequencies, is constructed.
    """

    rope_type: ClassVar[str]
    needs_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if type(self) is RotaryScaling:
            names = ", ".join(cls.__name__ for cls in SCALINGS.values())
            raise TypeError(f"RotaryScaling() is the base class, without frequencies; construct one of {names}")

    def frequencies(self, size: int, theta: float, length: Any = None) -> jax.Array:
        """The frequencies, in radians a position, (size / 2,) float32.

        Args:
          size: how many columns of a head are turned.
          theta: base of the frequencies.
          length: (...), how many positions the text has, beside which the frequencies are (..., size / 2); given
            where `needs_length`. None: those of a short text.
        """
        raise NotImplementedError

    def _deciding(self, length: Any) -> Any:
        """The part of the length of a text that decides frequencies: they are equal where this is."""
        return 0

    def _varies(self, length: Any) -> bool:
        """Whether texts of up to `length` positions have several frequencies; a symbolic length may be any."""
        return False

    def _check(self, size: int, theta: float) -> None:
        """Checks that there are frequencies for this size and base.

        Raises:
          ValueError: there are none.
        """

    @property
    def amplitude(self) -> float:
        """The factor that rotated queries and keys are multiplied by, each."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class RopeScaling(RotaryScaling):
    """The scaling of rotary frequencies that Llama 3.1 and later have, with Hugging Face's names.

    A frequency of wavelength w, n = original_max_position_embeddings / w turns over the original context, becomes

        frequency * (s + (1 - s) / factor),  s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor) in [0, 1]

    Raises:
      ValueError: a factor or a context that is no number above 0, or a high_freq_factor that is not above
        low_freq_factor, 0 or more.
    """

    rope_type: ClassVar[str] = "llama3"

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_positive(self, "factor", "high_freq_factor", "original_max_position_embeddings")
        check_not_negative(self, "low_freq_factor")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"RopeScaling: high_freq_factor={self.high_freq_factor!r}; it must be above "
                f"low_freq_factor={self.low_freq_factor!r}"
            )

    def frequencies(self, size: int, theta: float, length: Any = None) -> jax.Array:
        return self.scaled(rotary_frequencies(size, theta))

    def scaled(self, frequency: jax.Array) -> jax.Array:
        """The frequencies, in radians a position, after scaling."""
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        s = jnp.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequency * (s + (1 - s) / self.factor)


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling(RotaryScaling):
    """All frequencies divided by a factor: positions are interpolated (arXiv 2306.15595).

    Raises:
      ValueError: a factor that is no number above 0.
    """

    rope_type: ClassVar[str] = "linear"

    factor: float

    def __post_init__(self) -> None:
        check_positive(self, "factor")

    def frequencies(self, size: int, theta: float, length: Any = None) -> jax.Array:
        return rotary_frequencies(size, theta) / self.factor


@dataclasses.dataclass(frozen=True)
class DynamicRopeScaling(RotaryScaling):
    """A base that grows with the text beyond the original context, "dynamic NTK".

        theta' = theta * (factor * L / C - (factor - 1)) ** (size / (size - 2)),  L = max(length, C)

    with C = original_max_position_embeddings, which is max_position_embeddings of a config. The length is that of the
    text that a token is in, its row or its segment. So each token of a text beyond C changes the frequencies of all,
    and a model that generates it runs over the text anew: see `TextCache`. transformers keeps keys with the frequencies
    of the length at which they were made.

    Raises:
      ValueError: a factor below 1, or a context that is no number above 0.
    """

    rope_type: ClassVar[str] = "dynamic"
    needs_length: ClassVar[bool] = True

    factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_positive(self, "factor", "original_max_position_embeddings")
        _check_factor(self)

    def frequencies(self, size: int, theta: float, length: Any = None) -> jax.Array:
        context = self.original_max_position_embeddings
        length = jnp.asarray(self._deciding(context if length is None else length), jnp.float32)[..., None]
        growth = self.factor * length / context - (self.factor - 1)
        # A power of theta' without theta', which may overflow: theta's frequency by a power of the growth.
        exponent = jnp.arange(0, size, 2, dtype=jnp.float32) / max(size - 2, 1)
        return rotary_frequencies(size, theta) * growth**-exponent

    def _deciding(self, length: Any) -> Any:
        return jnp.maximum(length, self.original_max_position_embeddings)

    def _varies(self, length: Any) -> bool:
        return _may_exceed(length, self.original_max_position_embeddings)


@dataclasses.dataclass(frozen=True)
class YarnRopeScaling(RotaryScaling):
    """YaRN (arXiv 2309.00071), with Hugging Face's names.

    A frequency that turns beta_fast times or more over the original context stays, one that turns beta_slow times or
    less is divided by factor, and between them is a ramp over the frequencies' indices. Queries and keys are multiplied
    by attention_factor; by default 0.1 log(factor) + 1, or with mscale and mscale_all_dim the ratio of what these give
    as the factors of log(factor).

    Raises:
      ValueError: a factor below 1, a number that is not above 0, or a beta_fast that is not above beta_slow; of
        `frequencies`, theta=1.
    """

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        check_positive(self, "attention_factor")
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_not_negative(self, name)
        check_flags(self, "truncate")
        _check_factor(self)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"YarnRopeScaling: beta_fast={self.beta_fast!r}; it must be above beta_slow={self.beta_slow!r}"
            )

    def _check(self, size: int, theta: float) -> None:
        if theta == 1:
            raise ValueError(
                f"YarnRopeScaling: {theta=} beside it; it must not be 1, for frequencies are numbered by its logarithm"
            )

    def frequencies(self, size: int, theta: float, length: Any = None) -> jax.Array:
        self._check(size, theta)
        frequency = rotary_frequencies(size, theta)
        low, high = (self._frequency_index(turns, size, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 * (low == high)
        interpolated = jnp.clip((jnp.arange(size // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
        return frequency * (interpolated / self.factor + (1 - interpolated))

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._logarithm(self.mscale) / self._logarithm(self.mscale_all_dim)
        return self._logarithm(1.0)

    def _logarithm(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def _frequency_index(self, turns: float, size: int, theta: float) -> float:
        """The index, not rounded, of the frequency that turns so often over the original context."""
        return size * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RotaryScaling):
    """LongRoPE (arXiv 2402.13753), as in Phi-3: a factor for each frequency, for short texts and for long ones.

    A text, which is a row or a segment of it, is long if it has more than original_max_position_embeddings positions.
    One that becomes long while a model generates it has other frequencies then, and the model runs over it anew: see
    `TextCache`. Queries and keys are multiplied by attention_factor, by default
    sqrt(1 + log(factor) / log(original_max_position_embeddings)), 1 where factor is 1 or less.

    Raises:
      ValueError: factors of other than positive numbers, none, or not as many short ones as long ones; a factor or a
        context that is no number above 0; a context of 1 or less, whose logarithm divides, beside a factor above 1
        without an attention_factor; of `frequencies`, another size than twice as many factors.
    """

    rope_type: ClassVar[str] = "longrope"
    needs_length: ClassVar[bool] = True

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            is_sequence = isinstance(factors, tuple | list) and len(factors) > 0
            if not is_sequence or not all(is_number(x) and x > 0 for x in factors):
                raise ValueError(
                    f"LongRopeScaling: {name}={factors!r}; it must be a sequence of positive numbers, one or more"
                )
            object.__setattr__(self, name, tuple(factors))
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"LongRopeScaling: {len(self.short_factor)} short factors and {len(self.long_factor)} long ones; there "
                "must be as many of each, one for each frequency"
            )
        check_positive(self, "original_max_position_embeddings", "factor", "attention_factor")
        has_logarithm = self.attention_factor is None and self.factor > 1
        if has_logarithm and self.original_max_position_embeddings <= 1:
            raise ValueError(
                f"LongRopeScaling: original_max_position_embeddings={self.original_max_position_embeddings!r} beside "
                f"factor={self.factor!r} without an attention_factor; it must be above 1, for its logarithm divides"
            )

    def _check(self, size: int, theta: float) -> None:
        if len(self.short_factor) != size // 2:
            raise ValueError(
                f"LongRopeScaling: {len(self.short_factor)} factors for {size // 2} frequencies, those of {size} "
                "columns of a head that are turned; there must be one for each"
            )

    def frequencies(self, size: int, theta: float, length: Any = None) -> jax.Array:
        self._check(size, theta)
        short, long = (jnp.asarray(x, jnp.float32) for x in (self.short_factor, self.long_factor))
        is_long = jnp.asarray(False if length is None else self._deciding(length))[..., None]
        return rotary_frequencies(size, theta) / jnp.where(is_long, long, short)

    def _deciding(self, length: Any) -> Any:
        return length > self.original_max_position_embeddings

    def _varies(self, length: Any) -> bool:
        return _may_exceed(length, self.original_max_position_embeddings)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


SCALINGS = {cls.rope_type: cls for cls in RotaryScaling.__subclasses__()}


def _may_exceed(length: Any, limit: float) -> bool:
    return not isinstance(length, int) or length > limit  # a symbolic one is not known


def _check_factor(scaling: Any) -> None:
    if scaling.factor < 1:
        raise ValueError(f"{type(scaling).__name__}: factor={scaling.factor!r}; it must be 1 or more")


def rotary_angles(
    positions: jax.Array,
    head_dim: int,
    theta: float,
    scaling: RotaryScaling | None = None,
    *,
    partial_rotary_factor: float = 1.0,
    length: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of positions / theta ** (2 i / R): (..., T, head_dim / 2) float32 for positions (..., T).

    Args:
      positions: integers.
      head_dim: columns of a head.
      theta: base of the frequencies.
      scaling: of the frequencies, or None.
      partial_rotary_factor: R / head_dim. The last (head_dim - R) / 2 pairs of columns are not turned: cos 1, sin 0.
      length: integers, broadcastable to positions: how long the text of each is, which decides the frequencies of some
        scalings; default for each row its largest position plus 1.
    """
    size = turned_columns(head_dim, partial_rotary_factor)
    if scaling is None:
        frequency = rotary_frequencies(size, theta)
    else:
        if scaling.needs_length and length is None:
            length = jnp.max(positions, axis=-1 if positions.ndim else None, keepdims=True, initial=0) + 1
        frequency = scaling.frequencies(size, theta, length)
    if size < head_dim:
        frequency = jnp.pad(frequency, [(0, 0)] * (frequency.ndim - 1) + [(0, (head_dim - size) // 2)])
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def check_rotary(head_dim: int, theta: float | None, scaling: Any, partial_rotary_factor: float) -> None:
    """Checks that a head can be turned so; theta None is no rotary embedding; the others are not checked then.

    Args:
      head_dim, theta, scaling, partial_rotary_factor: as of `rotary_angles`.

    Raises:
      ValueError: an odd head_dim, a theta that is not finite and above 0, a scaling that has no frequencies for this
        head or this theta, or a partial_rotary_factor as of `turned_columns`.
      TypeError: a theta or a partial_rotary_factor that is no number, or a scaling that is no RotaryScaling.
    """
    if theta is None:
        return
    if head_dim % 2:
        raise ValueError(f"rotary embedding turns pairs: {head_dim=} is odd")
    check_positive_argument("rope_theta", theta)
    check_positive_argument("partial_rotary_factor", partial_rotary_factor)
    size = turned_columns(head_dim, partial_rotary_factor)
    if not isinstance(scaling, RotaryScaling | None):
        names = ", ".join(cls.__name__ for cls in SCALINGS.values())
        raise TypeError(f"rope_scaling={scaling!r}; it must be None or one of {names}")
    if scaling is not None:
        scaling._check(size, theta)


def turned_columns(head_dim: int, partial_rotary_factor: float) -> int:
    """R, how many columns of a head are turned.

    Raises:
      ValueError: a factor that is not above 0 and at most 1, or one that turns an odd number of columns.
    """
    size = int(head_dim * partial_rotary_factor)
    if not 0 < partial_rotary_factor <= 1 or size % 2 or (head_dim - size) % 2 or not size:
        raise ValueError(
            f"{partial_rotary_factor=} turns {size} of {head_dim=} columns; it must turn pairs, and leave pairs"
        )
    return size


def with_amplitude(
    q: jax.Array, scale: float | None, scaling: RotaryScaling | None, partial_rotary_factor: float
) -> tuple[jax.Array, float | None]:
    """q and the scale of scores, one of them multiplied by the factors of rotated queries and keys.

    The tables of cos and sin do not have the factor: backward passes rely on rotations that keep lengths. Where only
    some columns of a head are turned, the factor is theirs alone, and q has it.

    Args:
      q: (..., Dh), turned.
      scale: of scores; None for 1 / sqrt(Dh).
      scaling: of the rotary frequencies, or None.
      partial_rotary_factor: as of `rotary_angles`.
    """
    factor = 1.0 if scaling is None else scaling.amplitude**2
    if factor == 1:
        return q, scale
    head_dim = q.shape[-1]
    half, turned = head_dim // 2, turned_columns(head_dim, partial_rotary_factor) // 2
    if turned == half:
        return q, factor * (head_dim**-0.5 if scale is None else scale)
    factors = jnp.where(jnp.arange(head_dim) % half < turned, jnp.float32(factor), jnp.float32(1))
    return (q * factors).astype(q.dtype), scale
