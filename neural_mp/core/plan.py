"""Precision plans: human-readable, editable and replayable."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from neural_mp.core.enums import Approach
from neural_mp.core.observations import Observations
from neural_mp.core.precision import OpConfig, Precision, format_precision_name, parse_precisions
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError
from neural_mp.io.readers import prefix_file_errors, read_yaml
from neural_mp.io.yaml_reader import load_yaml
from neural_mp.util.optional_packages import create_data_frame
from neural_mp.util.text import Displayed
from neural_mp.util.validators import (
    InvalidValueError,
    enum_of,
    file_path,
    invalid_value_error,
    list_of,
    mapping_of,
    optional,
    preview_value,
    record,
    short_string,
    string,
    validate_at,
    validate_option,
)

FILE_VERSION = 2
#: Key of the plan in the metadata of a model file.
PLAN_KEY = "neural_mp.plan"
#: Key of the precisions of the given model in a plan file.
_SOURCE = "source_precisions"
#: Key of the accelerator in a plan file.
_TARGET = "target"
#: Key of the ops that run in INT8 by their neighbours.
_FOLLOWERS = "int8_followers"


@dataclass(frozen=True, eq=False)
class PrecisionPlan(Displayed, Mapping[str, OpConfig]):
    """Immutable, hashable mapping op → `OpConfig`; plans with equal configs are equal.

    Ops not named follow their neighbours (see `core.quantization_flow`).

    Attributes:
        configs: op → its configuration. FP32 is the precision of an op that is not lowered.
        source_precisions: the precisions in which the model was given, if known; a model in half
            precision that no op of the plan changes stays in that precision.
        target: the name of the accelerator that the plan is for; empty for a CPU, and if unknown.
        int8_followers: ops not named that run in INT8 by their neighbours under the plan as first
            converted, by which the consequences of an edit are found; empty if unknown.
    """

    configs: Mapping[str, OpConfig] = field(default_factory=dict)
    source_precisions: tuple[Precision, ...] = (Precision.FP32,)
    target: str = ""
    int8_followers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "configs", dict(self.configs))

    def __getitem__(self, op: str) -> OpConfig:
        return self.configs[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self.configs)

    def __len__(self) -> int:
        return len(self.configs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrecisionPlan) and self.configs == other.configs

    def __hash__(self) -> int:
        return self._configs_hash

    @cached_property
    def _configs_hash(self) -> int:
        return hash(frozenset(self.configs.items()))

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {precision}" for precision, count in self.counts().items())
        name = format_precision_name(self.source_precisions)
        source = "" if self._from_fp32 else f" of a model in {name}"
        return f"PrecisionPlan({counts or 'empty'}{source})"

    @property
    def _from_fp32(self) -> bool:
        return self.source_precisions == (Precision.FP32,)

    @property
    def precisions(self) -> dict[str, Precision]:
        """Op → precision."""
        return {op: config.precision for op, config in self.configs.items()}

    @property
    def internally_quantized(self) -> frozenset[str]:
        """INT8 ops with float inputs and outputs: dynamic ranges, or INT8 weights only."""
        approaches = (Approach.DYNAMIC, Approach.WEIGHT_ONLY)
        return frozenset(op for op, c in self.configs.items() if c.approach in approaches)

    def counts(self) -> dict[Precision, int]:
        """Return the number of named ops per precision, without zeros."""
        precisions = [config.precision for config in self.configs.values()]
        return {p: precisions.count(p) for p in Precision if p in precisions}

    def replacing(self, changes: Mapping[str, OpConfig]) -> PrecisionPlan:
        """Return a plan with the configs of some ops replaced."""
        return replace(self, configs={**self.configs, **changes})

    def without(self, ops: Collection[str]) -> PrecisionPlan:
        """Return a plan without some ops, which then follow their neighbours."""
        return replace(self, configs={o: item for o, item in self.configs.items() if o not in ops})

    def to_dict(self) -> dict[str, Any]:
        """Return plain strings and dicts, as written to YAML."""
        return {op: _config_to_plain(config) for op, config in self.configs.items()}

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row per op, indexed by `op`.

        Columns: precision, approach, weight, activation, corrections, kernel; as text, or None.

        Raises:
            MissingFrameworkError: pandas is not installed.
        """
        configs = self.configs.values()
        columns: dict[str, list[str | None]] = {
            "op": list(self),
            "precision": [config.precision.value for config in configs],
            **{
                name: [None if (value := getattr(c, name)) is None else str(value) for c in configs]
                for name in ("approach", "weight", "activation")
            },
            "corrections": [" ".join(config.corrections) or None for config in configs],
            "kernel": [config.kernel or None for config in configs],
        }
        return create_data_frame(columns, "op")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrecisionPlan:
        """Reverse `to_dict`; `op: fp32` is accepted as shorthand.

        Raises:
            PlanError: an entry is malformed; the message names the op.
        """
        with prefix_file_errors("the plan", PlanError):
            return parse_plan(data)

    def to_yaml(self, *, framework: str = "", observations: Observations | None = None) -> str:
        """Return the plan as editable YAML; with `observations`, sufficient for a replay."""
        document: dict[str, Any] = {"neural_mp_plan": FILE_VERSION}
        if framework:
            document["framework"] = framework
        if self.target:
            document[_TARGET] = self.target
        if not self._from_fp32:
            document[_SOURCE] = [precision.value for precision in self.source_precisions]
        document["ops"] = self.to_dict()
        if self.int8_followers:
            document[_FOLLOWERS] = list(self.int8_followers)
        if observations is not None:
            document["observations"] = observations.to_dict()
        return yaml.dump(document, Dumper=_PlanDumper, sort_keys=False, width=100)

    @classmethod
    def from_yaml(cls, text: str, origin: str = "the plan") -> PrecisionPlan:
        """Read a plan from YAML.

        Raises:
            PlanError: the text is not a plan; the message names `origin` and the mistake.
        """
        with prefix_file_errors(origin, PlanError):
            return _parse_document(load_yaml(text))[0]

    def save(self, path: str | Path, **contents: Any) -> None:
        """Write `to_yaml(**contents)` to a file.

        Raises:
            PlanError: the file cannot be written.
        """
        try:
            file = validate_option("the plan file", file_path, path)
            file.write_text(self.to_yaml(**contents), encoding="utf-8")
        except OSError as error:
            raise PlanError(f"the plan file {str(path)!r} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> PrecisionPlan:
        """Read the plan from a file written by `save`."""
        return load_plan_file(path)[0]


def load_plan_file(path: str | Path) -> tuple[PrecisionPlan, Observations | None]:
    """Read a plan file: the plan, and its observations if the file contains them.

    Raises:
        PlanError: the file is missing or not a plan.
    """
    return read_yaml(path, _parse_document, PlanError)


# Observations are thousands of numbers; libyaml, if available, is ten times as fast.
_SAFE_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _PlanDumper(_SAFE_DUMPER):
    """YAML dumper that writes lists on one line, to keep files short."""


_PlanDumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
)


def _parse_document(value: object) -> tuple[PrecisionPlan, Observations | None]:
    if not isinstance(value, Mapping) or "ops" not in value:
        raise invalid_value_error("a plan: a mapping with the key 'ops'", value)
    if value.get("neural_mp_plan") != FILE_VERSION:
        raise InvalidValueError(
            f"neural_mp_plan must be {FILE_VERSION}, got "
            f"{preview_value(value.get('neural_mp_plan'))}; write the plan again with this "
            "version of neural-mp"
        )
    observed = value.get("observations")
    plan = validate_at("ops", parse_plan, value["ops"])
    if _SOURCE in value:
        precisions = validate_at(_SOURCE, _SOURCES, value[_SOURCE])
        plan = replace(plan, source_precisions=precisions or plan.source_precisions)
    if _TARGET in value:
        plan = replace(plan, target=validate_at(_TARGET, short_string, value[_TARGET]))
    if _FOLLOWERS in value:
        plan = replace(plan, int8_followers=validate_at(_FOLLOWERS, _NAMES, value[_FOLLOWERS]))
    return plan, validate_at("observations", Observations.from_dict, observed) if observed else None


def parse_plan(value: object) -> PrecisionPlan:
    """Validate and return the plan that `to_dict` wrote; usable as a validator.

    Raises:
        NeuralMPError: the value is not a plan.
    """
    return PrecisionPlan(mapping_of(_parse_config)(value))


def _config_to_plain(config: OpConfig) -> Any:
    if config == OpConfig(config.precision):
        return config.precision.value
    entry = {"precision": config.precision.value}
    if config.weight is not None:
        entry["weight"] = str(config.weight)
    if config.activation is not None:
        entry["activation"] = str(config.activation)
    if config.corrections:
        entry["corrections"] = " ".join(config.corrections)
    if config.kernel:
        entry["kernel"] = config.kernel
    return entry


def _parse_config(entry: object) -> OpConfig:
    if isinstance(entry, str):
        return OpConfig(_parse_precision(entry))
    if not isinstance(entry, Mapping):
        raise invalid_value_error(
            "a precision, e.g. 'fp32', or a mapping with the key 'precision'", entry
        )
    values = _ENTRY(entry)
    corrections = tuple((values.pop("corrections", None) or "").split())
    kernel = values.pop("kernel", None) or ""
    return OpConfig(**values, corrections=corrections, kernel=kernel)


def _parse_precision(value: object) -> Precision:
    precisions = parse_precisions(short_string(value))
    if len(precisions) > 1:
        raise invalid_value_error("one precision", value)
    return precisions[0]


def _parse_quant_spec(value: object) -> QuantSpec | None:
    return QuantSpec.parse(short_string(value)) if value else None


_NAMES = list_of(string)
_SOURCES = list_of(enum_of(Precision), most=len(Precision))
_ENTRY = record(
    {"precision": _parse_precision},
    {
        "weight": _parse_quant_spec,
        "activation": _parse_quant_spec,
        "corrections": optional(short_string),
        "kernel": optional(short_string),
    },
    strict=True,
)
