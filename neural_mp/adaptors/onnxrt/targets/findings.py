"""Findings of the audits of a target: which op breaks which rule."""

from __future__ import annotations

from dataclasses import dataclass

from neural_mp.util.string_enum import StringEnum


class Rule(StringEnum):
    """Rule of a target; the last four are checked by its compiler, the others in the file."""

    OPSET = "opset"
    DOMAIN = "domain"
    SHAPES = "shapes"
    IO = "io"
    TYPE = "type"
    ZERO_POINT = "zero_point"
    SCALE = "scale"
    PAIR = "pair"
    GRANULARITY = "granularity"
    WEIGHT = "weight"
    BIAS = "bias"
    RING = "ring"
    WIDTH = "width"
    SAME_SCALE = "same_scale"
    FIXED = "fixed"
    SHIFT = "shift"
    REFUSED = "refused"
    COMPILE = "compile"
    FLOAT_KERNEL = "float_kernel"
    NOISE = "noise"


@dataclass(frozen=True)
class Finding:
    """A violation of a target's rule.

    Attributes:
        op: name of the op; empty for the file as a whole.
        op_type: type of the op; empty for the file as a whole.
        rule: the rule.
        message: text that names the op and what was expected.
    """

    op: str
    op_type: str
    rule: Rule
    message: str
