"""Profiles of targets: what the compiler of an accelerator computes in integers, and at which cost.

A profile is a YAML file: one shipped with this package, by its name, or the user's own, by its
path. Schema and sources of each field: `docs/targets.md`.

Widths are bits of the weight and of the activations, in the terms of the field: `w8a16` has weights
of 8 bits and activations of 16; `a16` is an op without a weight. An op has one width for all its
float inputs and outputs.

Times are measured on devices only; the estimate orders plans, and is called an estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from math import inf
from pathlib import Path
from typing import Annotated

from neural_mp.core.enums import Granularity, QuantDType, Scheme
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.io.readers import read_yaml
from neural_mp.util.json_fields import JsonFields
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.validators import (
    integer,
    invalid_value_error,
    list_of,
    one_of,
    positive_float,
    short_string,
)

#: Reason of an op that only moves values.
MOVES = "it keeps the integers that it moves"
#: Reason of a further output of an op.
FURTHER_OUTPUT = "it is a further output of an op and has the precision of that op"
#: Reasons of ops that have the widths of another op.
FOLLOWING = (MOVES, FURTHER_OUTPUT)
#: Version of the schema.
SCHEMA = 1
#: Suffixes of the files of users' own profiles.
SUFFIXES = (".yaml", ".yml")
#: Other names of shipped profiles.
ALIASES: Mapping[str, str] = {"vitisai": "vitisai-xint8"}
#: Rewrites of a graph before planning, besides folded constants and batch norms.
REWRITES = ("constant_first", "erf_to_gelu", "layer_norm", "mask_clip", "matmul_bias")

_DOCS = "docs/targets.md"
#: Bytes of a float element, in which ops outside of integers read and write on average.
_FLOAT_BYTES = 4.0


class Widths(StringEnum):
    """Bits of an op's weight, if any, and of its activations; the narrowest first."""

    A8 = "a8"
    W8A8 = "w8a8"
    A16 = "a16"
    W4A16 = "w4a16"
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


def _parse_schema(value: object) -> int:
    if integer(value) != SCHEMA:
        raise invalid_value_error(f"{SCHEMA}, the version that this release reads", value)
    return SCHEMA


def _parse_opsets(value: object) -> tuple[int, int]:
    bounds = list_of(integer, "the least and the newest opset")(value)
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise invalid_value_error("the least and the newest opset, e.g. [13, 21]", value)
    return bounds[0], bounds[1]


_OpTypes = Annotated[
    frozenset[str], lambda value: frozenset(list_of(short_string, "a list of op types")(value))
]
_Granularity = Annotated[
    Granularity,
    lambda value: Granularity(one_of((Granularity.PER_CHANNEL, Granularity.PER_TENSOR))(value)),
]
_Name = Annotated[str, short_string]
_Factor = Annotated[float, positive_float]
_POWER_OF_TWO = "power_of_two"
_ScaleRule = Annotated[str, one_of(("any", _POWER_OF_TWO))]


class _Part(JsonFields):
    """A part of a profile: a misspelt key is an error, not a rule without effect."""

    refuses_unknown_keys = True


@dataclass(frozen=True)
class Activations(_Part):
    """Quantization of activations.

    Attributes:
        types: storage types, the cheapest first.
        scheme: `asymmetric`, or `symmetric` with the zero point in the middle of the type.
        scale: `any`, or `power_of_two`.
    """

    types: tuple[QuantDType, ...]
    scheme: Scheme
    scale: _ScaleRule = "any"

    @property
    def needs_power_of_two(self) -> bool:
        """Whether every scale must be a power of two."""
        return self.scale == _POWER_OF_TWO

    def of_bits(self, bits: int) -> QuantDType | None:
        """Return the storage type of a width; None if the target has none."""
        return next((dtype for dtype in self.types if dtype.bits == bits), None)


@dataclass(frozen=True)
class Weights(_Part):
    """Quantization of weights.

    Attributes:
        types: storage types, the cheapest first.
        granularity: `per_channel`, along the output channels, or `per_tensor`.
        per_tensor: op types whose weights have one scale all the same.
        scale: `any`, or `power_of_two`.
        by_op: op type → the storage type of its weight, if not one of `types`.
    """

    types: tuple[QuantDType, ...]
    granularity: _Granularity
    per_tensor: _OpTypes = frozenset()
    scale: _ScaleRule = "any"
    by_op: Mapping[_Name, QuantDType] = field(default_factory=dict)

    @property
    def needs_power_of_two(self) -> bool:
        """Whether every scale must be a power of two."""
        return self.scale == _POWER_OF_TWO

    def of_bits(self, op_type: str, bits: int) -> QuantDType | None:
        """Return the storage type of an op type's weight; None if the target has none."""
        own = self.by_op.get(op_type)
        if own is not None and own.bits == bits:
            return own
        return next((dtype for dtype in self.types if dtype.bits == bits), None)

    def granularity_of(self, op_type: str) -> Granularity:
        """Return the granularity of an op type's weight."""
        return Granularity.PER_TENSOR if op_type in self.per_tensor else self.granularity


@dataclass(frozen=True)
class Placement(_Part):
    """Places of QuantizeLinear and DequantizeLinear.

    Attributes:
        inputs: `all` inputs of an op in integers; or, if a `weighted` op alone computes one of
            them for an op without a weight, all besides this one, as the compiler fuses both ops.
        outputs: `always`, or only `between` two ops in integers.
        weights: `dq` for stored integers, `qdq` for stored floats that the compiler rounds.
        io: `float` or `quantized` graph inputs and outputs.
    """

    inputs: Annotated[str, one_of(("all", "weighted"))] = "all"
    outputs: Annotated[str, one_of(("always", "between"))] = "always"
    weights: Annotated[str, one_of(("dq", "qdq"))] = "dq"
    io: Annotated[str, one_of(("float", "quantized"))] = "float"


@dataclass(frozen=True)
class Group(_Part):
    """Op types without a weight that the target computes in the same widths.

    Attributes:
        types: the op types.
        widths: the widths, the cheapest first.
    """

    types: _OpTypes
    widths: tuple[Widths, ...]


@dataclass(frozen=True)
class Shifts(_Part):
    """Limits of the shifts of integer units whose scales are powers of two.

    The position of a scale is -log2 of it. With the positions of input, weight, output and bias,
    the result is shifted by `input + weight - output`, and the bias by `input + weight - bias`.

    Attributes:
        result: the least and the largest shift of the result.
        bias: the largest shift of the bias; the least is `result shift - 16`, and 0 at most.
    """

    result: tuple[int, int]
    bias: int


@dataclass(frozen=True)
class Cost(_Part):
    """Estimated cost: of a multiplication by its widths, and of an element.

    Attributes:
        macs: widths → cost of a multiplication.
        float_mac: cost of a multiplication in float.
        element: cost of an element of 8 bits that an op writes; wider ones count in proportion.
    """

    macs: Mapping[Widths, _Factor]
    float_mac: _Factor
    element: _Factor = 0.5


@dataclass(frozen=True)
class TargetProfile(_Part):
    """A target.

    Attributes:
        schema: version of the schema.
        name: the word for `target`.
        title: the name in reports.
        evidence: `measured`, with the target's compiler, or from `documents`.
        opset: the least and the newest opset.
        shapes: `static` or `dynamic`.
        activation: quantization of activations.
        weight: quantization of weights.
        ops: op type → widths of ops with a weight, their second input, the cheapest first.
        cost: estimated cost.
        provider: name of the execution provider of ONNX Runtime; null if another runtime reads the
            file.
        bias: `int32`, with the product of the scales of input and weight, `int8` with a scale of
            its own, or `float`.
        shifts: limits of shifts, if scales are powers of two; null without such limits.
        placement: places of QuantizeLinear and DequantizeLinear.
        same_scale: op types whose result keeps type, scale and zero point of their inputs.
        float_type: precision of ops that stay in float; null if the target has no float.
        fixed: op type → storage type → the scale and zero point of its output.
        others: groups of op types without weights.
        float_only: op type → the reason why an op stays in float although the compiler takes
            quantized inputs.
        refuse: op types that the compiler does not take.
        rewrites: rewrites of the graph before planning; by default masks are clipped, as an addend
            of -3.4e38 before a Softmax takes all steps of a scale.
        options: options of the execution provider.
        sources: addresses of documents and sources.
    """

    schema: Annotated[int, _parse_schema]
    name: _Name
    title: _Name
    evidence: Annotated[str, one_of(("measured", "documents"))]
    opset: Annotated[tuple[int, int], _parse_opsets]
    shapes: Annotated[str, one_of(("static", "dynamic"))]
    activation: Activations
    weight: Weights
    ops: Mapping[_Name, tuple[Widths, ...]]
    cost: Cost
    provider: _Name | None = None
    bias: Annotated[str, one_of(("int32", "int8", "float"))] = "int32"
    shifts: Shifts | None = None
    placement: Placement = Placement()
    same_scale: _OpTypes = frozenset()
    float_type: Precision | None = None
    fixed: Mapping[_Name, Mapping[QuantDType, tuple[float, int]]] = field(default_factory=dict)
    others: tuple[Group, ...] = ()
    float_only: Mapping[_Name, str] = field(default_factory=dict)
    refuse: _OpTypes = frozenset()
    rewrites: tuple[Annotated[str, one_of(REWRITES)], ...] = ("mask_clip",)
    options: Mapping[_Name, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    @cached_property
    def _widths_by_type(self) -> Mapping[str, tuple[Widths, ...]]:
        groups = {kind: group.widths for group in self.others for kind in group.types}
        return {**groups, **self.ops}

    def widths_of(self, op_type: str) -> tuple[Widths, ...]:
        """Return the widths that the target computes an op type in, the cheapest first."""
        return self._widths_by_type.get(op_type, ())

    def is_searched(self, op_type: str, widths: Widths) -> bool:
        """Whether widths may be the best: no wider ones have an estimated cost as low.

        Other widths are for plans alone.
        """
        macs, bits = self.cost.macs, widths.weight_bits
        return bits is None or not any(
            other.activation_bits >= widths.activation_bits
            and (other.weight_bits or 0) > bits
            and macs.get(other, inf) <= macs.get(widths, inf)
            for other in self.widths_of(op_type)
        )

    def widths_of_kind(self, has_weight: bool) -> tuple[Widths, ...]:
        """Return all widths of ops with a weight, or of those without, the narrowest first."""
        weighted = {widths for by_op in self.ops.values() for widths in by_op}
        bits = {dtype.bits for dtype in self.activation.types}
        plain = {widths for widths in Widths if widths.activation_bits in bits}
        kinds = weighted if has_weight else plain
        return tuple(w for w in Widths if w in kinds and (w.weight_bits is not None) == has_weight)

    @property
    def is_measured(self) -> bool:
        """Whether the rules were measured with the target's compiler."""
        return self.evidence == "measured"


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles, and their other names."""
    files = resources.files("neural_mp.targets").iterdir()
    stems = (f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))
    return tuple(sorted({*stems, *ALIASES}))


def is_profile(target: str) -> bool:
    """Whether a target is an accelerator: the name or the path of a profile."""
    return target in profile_names() or Path(target).suffix in SUFFIXES


def load_profile(target: str) -> TargetProfile:
    """Return the profile of a name, or of a path of the user's own file.

    Raises:
        ConfigurationError: there is no such profile, or the file does not match the schema.
    """
    names = profile_names()
    if target in names:
        stem = ALIASES.get(target, target)
        path = Path(str(resources.files("neural_mp.targets") / f"{stem}.yaml"))
    elif Path(target).suffix in SUFFIXES:
        path = Path(target)
    else:
        raise ConfigurationError(
            f"target must be one of {', '.join(names)}, or the path of a profile, got {target!r}"
            f"{did_you_mean(target, names)}"
        )
    try:
        return read_yaml(path, TargetProfile.from_dict, ConfigurationError)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; the keys of target profiles: {_DOCS}") from None


@dataclass(frozen=True)
class TargetCosts:
    """The work of a model's ops, and its estimated cost on a target.

    Attributes:
        profile: the target.
        macs: op → multiplications with one sample.
        elements: op → elements that the op writes with one sample.
    """

    profile: TargetProfile
    macs: Mapping[str, float]
    elements: Mapping[str, float]

    def of_op(self, op: str, config: OpConfig) -> float:
        """Return the estimated cost of an op in a config."""
        widths, cost = Widths.from_config(config), self.profile.cost
        if widths is None:
            per_mac, size = cost.float_mac, _FLOAT_BYTES
        else:
            size = widths.activation_bits / 8
            per_mac = cost.macs.get(widths, size)
        return self.macs.get(op, 0.0) * per_mac + self.elements.get(op, 0.0) * cost.element * size

    def of_plan(self, configs: Mapping[str, OpConfig]) -> float:
        """Return the estimated cost of a plan; ops that are not named are in float."""
        return sum(self.of_op(op, configs.get(op, FP32)) for op in self.elements)

    def estimate_objectives(self, configs: Mapping[str, OpConfig]) -> dict[str, float]:
        """Return the estimated cost of a plan as objectives: in units, and relative to float."""
        cost, in_float = self.of_plan(configs), self.of_plan({})
        return {"target": cost, "relative_target": cost / in_float if in_float else 1.0}

    def multiplication_shares(self, configs: Mapping[str, OpConfig]) -> dict[str, float]:
        """Return the word of the widths → their fraction of all multiplications.

        Products of two activations count as `w8a8` or `w16a16`, by the type of both factors, and
        ops in float as the precision in which the target computes them.
        """
        counts: dict[str, float] = defaultdict(float)
        for op, macs in self.macs.items():
            config = configs.get(op, FP32)
            word = str(Widths.from_config(config) or self.profile.float_type or config.precision)
            counts[_OF_PRODUCTS.get(word, word)] += macs
        total = sum(counts.values())
        return {word: macs / total for word, macs in counts.items() if macs} if total else {}


_OF_PRODUCTS = {Widths.A8.value: Widths.W8A8.value, Widths.A16.value: Widths.W16A16.value}
