"""Limit of a model's size, in bytes or in bits per weight."""

from __future__ import annotations

from dataclasses import dataclass

from neural_mp.errors import ConfigurationError
from neural_mp.util.validators import integer_between, is_finite, validate_option, values_matching

_FLOAT_BITS = 32
#: Upper bound of a number of bytes, exact as a float.
_MOST_BYTES = 1 << 53
_BITS = values_matching(
    f"a number of bits per weight above 0, at most {_FLOAT_BITS}",
    lambda value: is_finite(value) and 0 < value <= _FLOAT_BITS,
)
#: Options → checks of their values.
SIZE_LIMITS = {"max_bytes": integer_between(1, _MOST_BYTES), "max_bits": _BITS}


@dataclass(frozen=True)
class SizeLimit:
    """Limit of the size of all weights.

    Attributes:
        max_bytes: bytes of all weights.
        max_bits: mean bits per weight of the whole model, with the parameters of groups.

    Raises:
        ConfigurationError: a value is out of range, or both are set.
    """

    max_bytes: int | None = None
    max_bits: float | None = None

    def __post_init__(self) -> None:
        for name, kind in SIZE_LIMITS.items():
            if getattr(self, name) is not None:
                validate_option(name, kind, getattr(self, name))
        if self.max_bytes is not None and self.max_bits is not None:
            raise ConfigurationError("max_bytes and max_bits exclude each other; remove one")

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self.max_bytes is not None or self.max_bits is not None

    def limit_in_bytes(self, float_bytes: int) -> int:
        """Return the limit in bytes for a model of this size in FP32."""
        if self.max_bytes is not None:
            return self.max_bytes
        return int(float_bytes * (self.max_bits or _FLOAT_BITS) / _FLOAT_BITS)

    def __str__(self) -> str:
        if self.max_bytes is not None:
            return f"max_bytes = {self.max_bytes}"
        return f"max_bits = {self.max_bits:g}" if self.max_bits is not None else "no size limit"
