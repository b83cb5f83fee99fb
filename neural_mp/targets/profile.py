"""Profiles of targets: what the compiler of an accelerator computes in integers, and how.

A profile is a YAML file: one shipped with this package, by its name, or the user's own, by its
path. Schema and sources of each field: `docs/targets.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from neural_mp.core.enums import Granularity, QuantDType, Scheme
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.io.readers import read_yaml
from neural_mp.targets.widths import Widths

#: Version of the schema.
SCHEMA = 1
#: Suffixes of the files of users' own profiles.
SUFFIXES = (".yaml", ".yml")
#: Rewrites of a graph before planning, in the order of application.
REWRITES = (
    "static_shapes",
    "fold_constants",
    "fold_batch_norm",
    "erf_to_gelu",
    "fuse_layer_norm",
    "mask_clip",
    "name_nodes",
)

_Dtype = Annotated[QuantDType, BeforeValidator(QuantDType)]
_Widths = Annotated[Widths, BeforeValidator(Widths)]
_Scheme = Annotated[Scheme, BeforeValidator(Scheme)]
_Granularity = Annotated[Granularity, BeforeValidator(Granularity)]
_Precision = Annotated[Precision, BeforeValidator(Precision)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Activations(_Part):
    """Quantization of activations.

    Attributes:
        types: storage types, the cheapest first.
        scheme: `asymmetric`, or `symmetric` with the zero point in the middle of the type.
        scale: `any`, or `power_of_two`.
    """

    types: tuple[_Dtype, ...]
    scheme: _Scheme
    scale: Literal["any", "power_of_two"] = "any"

    def of_bits(self, bits: int) -> QuantDType | None:
        """Return the storage type of a width; None if the target has none."""
        return next((dtype for dtype in self.types if dtype.bits == bits), None)


class Weights(_Part):
    """Quantization of weights.

    Attributes:
        types: storage types, the cheapest first.
        granularity: `per_channel`, along the output channels, or `per_tensor`.
        per_tensor: op types whose weights have one scale all the same.
        scale: `any`, or `power_of_two`.
        by_op: op type → the storage type of its weight, if not one of `types`.
    """

    types: tuple[_Dtype, ...]
    granularity: _Granularity
    per_tensor: frozenset[str] = frozenset()
    scale: Literal["any", "power_of_two"] = "any"
    by_op: Mapping[str, _Dtype] = Field(default_factory=dict)

    def of_bits(self, op_type: str, bits: int) -> QuantDType | None:
        """Return the storage type of an op type's weight; None if the target has none."""
        own = self.by_op.get(op_type)
        if own is not None and own.bits == bits:
            return own
        return next((dtype for dtype in self.types if dtype.bits == bits), None)

    def granularity_of(self, op_type: str) -> Granularity:
        """Return the granularity of an op type's weight."""
        return Granularity.PER_TENSOR if op_type in self.per_tensor else self.granularity


class Placement(_Part):
    """Places of QuantizeLinear and DequantizeLinear.

    Attributes:
        inputs: `all` inputs of an op in integers, or only those of ops with a `weighted` operand.
        outputs: `always`, or only `between` two ops in integers.
        weights: `dq` for stored integers, `qdq` for stored floats that the compiler rounds.
        io: `float` or `quantized` graph inputs and outputs.
    """

    inputs: Literal["all", "weighted"] = "all"
    outputs: Literal["always", "between"] = "always"
    weights: Literal["dq", "qdq"] = "dq"
    io: Literal["float", "quantized"] = "float"


class Group(_Part):
    """Op types that the target computes in the same widths."""

    types: frozenset[str]
    widths: tuple[_Widths, ...]


class Cost(_Part):
    """Estimated cost: of a multiplication by its widths, and of an element.

    Attributes:
        macs: widths → cost of a multiplication.
        float_mac: cost of a multiplication in float.
        element: widths-independent cost of an element that an op without weight writes in 8 bits.
        convert: cost of an element that is converted between widths or to float.
    """

    macs: Mapping[_Widths, float]
    float_mac: float
    element: float = 0.5
    convert: float = 0.5


class TargetProfile(_Part):
    """A target.

    Attributes:
        schema_version: version of the schema, `schema` in the file.
        name: the word for `target`.
        title: the name in reports.
        evidence: `measured`, with the target's compiler, or from `documents`.
        provider: name of the execution provider of ONNX Runtime; None if another runtime reads the
            file.
        opset: the least and the newest opset.
        shapes: `static` or `dynamic`.
        bias: `int32`, with the product of the scales, `int8` with a scale of its own, or `float`.
        same_scale: op types that keep type, scale and zero point of their first input.
        float_type: precision of ops that stay in float; None if the target has no float.
        fixed: op type → storage type → the scale and zero point of its output.
        ops: op type → widths of ops with a weight, the cheapest first.
        others: groups of op types without weights.
        float_only: op type → the reason why an op stays in float although the compiler takes
            quantized inputs.
        refuse: op types that the compiler does not take.
        rewrites: names in `REWRITES`.
        options: options of the execution provider.
        sources: addresses of documents and sources.
    """

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    title: str
    evidence: Literal["measured", "documents"]
    provider: str | None = None
    opset: tuple[int, int]
    shapes: Literal["static", "dynamic"]
    activation: Activations
    weight: Weights
    bias: Literal["int32", "int8", "float"] = "int32"
    placement: Placement = Placement()
    same_scale: frozenset[str] = frozenset()
    float_type: _Precision | None = None
    fixed: Mapping[str, Mapping[_Dtype, tuple[float, int]]] = Field(default_factory=dict)
    ops: Mapping[str, tuple[_Widths, ...]]
    others: tuple[Group, ...] = ()
    float_only: Mapping[str, str] = Field(default_factory=dict)
    refuse: frozenset[str] = frozenset()
    rewrites: tuple[Literal[REWRITES], ...] = ()  # type: ignore[valid-type]
    cost: Cost
    options: Mapping[str, str] = Field(default_factory=dict)
    sources: tuple[str, ...] = ()

    @cached_property
    def _widths(self) -> Mapping[str, tuple[Widths, ...]]:
        groups = {kind: group.widths for group in self.others for kind in group.types}
        return {**groups, **self.ops}

    def widths_of(self, op_type: str) -> tuple[Widths, ...]:
        """Return the widths that the target computes an op type in, the cheapest first."""
        return self._widths.get(op_type, ())

    @property
    def is_measured(self) -> bool:
        """Whether the rules were measured with the target's compiler."""
        return self.evidence == "measured"


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    files = resources.files("neural_mp.targets").iterdir()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


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
        path = Path(str(resources.files("neural_mp.targets") / f"{target}.yaml"))
    elif Path(target).suffix in SUFFIXES:
        path = Path(target)
    else:
        raise ConfigurationError(
            f"target must be one of {', '.join(names)}, or the path of a profile, got {target!r}"
            f"{did_you_mean(target, names)}"
        )
    return read_yaml(path, _parse_profile, ConfigurationError)


def _parse_profile(document: object) -> TargetProfile:
    try:
        return TargetProfile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the profile"
        raise ConfigurationError(
            f"{where} must fit the schema of target profiles: {first['msg']}; see docs/targets.md"
        ) from None
