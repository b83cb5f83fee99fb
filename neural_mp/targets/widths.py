"""Widths of integer ops on accelerators: bits of the weight and of the activations.

The words are the field's: `w8a16` has weights of 8 bits and activations of 16; `a16` is an op
without a weight. An op has one width for all its float inputs and outputs.
"""

from __future__ import annotations

from neural_mp.core.precision import OpConfig, Precision
from neural_mp.util.string_enum import StringEnum

#: Reason of an op that only moves values.
MOVES = "it keeps the integers that it moves"
#: Reason of a further output of an op.
FURTHER_OUTPUT = "it is a further output of an op and has the precision of that op"
#: Reasons of ops that have the widths of another op.
FOLLOWING = (MOVES, FURTHER_OUTPUT)


class Widths(StringEnum):
    """Bits of an op's weight, if any, and of its activations; the narrowest first."""

    A8 = "a8"
    W8A8 = "w8a8"
    A16 = "a16"
    W8A16 = "w8a16"
    W16A16 = "w16a16"

    @property
    def activation_bits(self) -> int:
        """Bits of the activations."""
        return int(self.value.rpartition("a")[2])

    @property
    def weight_bits(self) -> int | None:
        """Bits of the weight; None for an op without a weight."""
        weight = self.value.rpartition("a")[0]
        return int(weight.removeprefix("w")) if weight else None

    @property
    def precision(self) -> Precision:
        """The precision of the op in a plan."""
        return Precision.INT8 if self.activation_bits == 8 else Precision.INT16

    @classmethod
    def from_config(cls, config: OpConfig) -> Widths | None:
        """Return the widths of a config in integers; None for a float config."""
        if config.activation is None:
            return None
        weight = "" if config.weight is None else f"w{config.weight.dtype.bits}"
        return cls(f"{weight}a{config.activation.dtype.bits}")


def words_of(config: OpConfig) -> str:
    """Return the word of a config in plans and reports: widths, or the float precision."""
    return str(Widths.from_config(config) or config.precision)
