"""Serialization of the record of a run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.trial import Trial
from neural_mp.errors import HistoryError
from neural_mp.io.readers import prefix_file_errors, read_json
from neural_mp.runs.report import ProbeMeasurements, RunEnd, RunRecord, RunStart
from neural_mp.space import Capability
from neural_mp.util.json_fields import build_field_validators, to_plain
from neural_mp.util.validators import (
    InvalidValueError,
    boolean,
    enum_of,
    finite,
    finite_numbers,
    integer_between,
    keep_original_value,
    list_of,
    mapping_of,
    non_negative_float,
    non_negative_integer,
    number,
    optional,
    preview_value,
    record,
    string,
    validate_at,
)


def setup_to_dict(setup: RunStart) -> dict[str, Any]:
    """Return a `RunStart` as plain lists, dicts, numbers and strings."""
    graph = setup.graph
    reasons: dict[str, int] = {}  # few distinct reasons: stored once
    ops = []
    for op in graph:
        entry = setup.capabilities[op.name]
        why = {p.value: reasons.setdefault(w, len(reasons)) for p, w in entry.reasons.items()}
        ops.append(
            {
                **op.to_dict(),
                "runs in": [p.value for p in entry.precisions],
                **({"emulated": sorted(p.value for p in entry.emulated)} if entry.emulated else {}),
                **({"why not": why} if why else {}),
            }
        )
    described = {name: to_plain(getattr(setup, name)) for name in (*_REQUIRED, *_EXTRA)}
    return {
        **described,
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "ops": ops,
        "reasons": list(reasons),
    }


def setup_from_dict(data: object) -> RunStart:
    """Read the output of `setup_to_dict`.

    Raises:
        NeuralMPError: the data does not match the schema.
    """
    values = _SETUP(data)
    reasons, stored = values.pop("reasons"), values.pop("ops")
    capabilities = {
        op.name: Capability(
            tuple(OpConfig(precision) for precision in kernels["runs in"]),
            validate_at("ops", _parse_reasons, (kernels, reasons)),
            frozenset(kernels.get("emulated", ())),
        )
        for op, kernels in stored
    }
    graph = OpGraph([op for op, _ in stored], values.pop("inputs"), values.pop("outputs"))
    return _check_names_in_graph(RunStart(**values, graph=graph, capabilities=capabilities))


def _check_names_in_graph(setup: RunStart) -> RunStart:
    """Return the setup; raise an InvalidValueError if a name is not in its graph."""
    ops = {op.name for op in setup.graph}
    sources = ops | set(setup.graph.inputs)
    tensors = setup.tensors
    quantizing = [op for tensor in tensors for op in tensor.quantizing_ops]
    named = {
        "outputs": (setup.graph.outputs, sources),
        "ops.fusion_group": ([op.fusion_group for op in setup.graph if op.fusion_group], ops),
        "tunable_ops": (setup.tunable_ops, ops),
        "fan_in": (setup.fan_in, ops),
        "tensors.name": ([tensor.name for tensor in tensors], sources),
        "tensors.producers": ([op for tensor in tensors for op in tensor.producers], ops),
        "tensors.consumers": ([op for tensor in tensors for op in tensor.consumers], ops),
        "tensors.quantizing_ops": (quantizing, ops),
    }
    for key, (names, expected) in named.items():
        for name in names:
            if name not in expected:
                raise InvalidValueError(
                    f"{key}: expected the name of an op, found {preview_value(name)}"
                )
    return setup


def _parse_reasons(given: tuple[Mapping[str, Any], Sequence[str]]) -> dict[Precision, str]:
    """Return precision → reason why an op is ineligible, from the shared list of reasons."""
    kernels, reasons = given
    parsed = {}
    for name, index in kernels.get("why not", {}).items():
        if index >= len(reasons):
            raise InvalidValueError(
                f"expected the place of one of {len(reasons)} reasons, found {index}"
            )
        parsed[Precision.parse(name, "a precision", InvalidValueError)] = reasons[index]
    return parsed


_NAMES = list_of(string)
_KERNELS = record(
    {"runs in": list_of(enum_of(Precision))},
    {"emulated": list_of(enum_of(Precision)), "why not": mapping_of(non_negative_integer)},
)
_REQUIRED, _EXTRA = build_field_validators(RunStart, without=("graph", "capabilities"))
_SETUP = record(
    {
        **_REQUIRED,
        **dict.fromkeys(("inputs", "outputs", "reasons"), _NAMES),
        "ops": list_of(lambda value: (Op.from_dict(value), _KERNELS(value))),
    },
    _EXTRA,
)


def record_to_dict(record: RunRecord) -> dict[str, Any]:
    """Return a whole record as plain lists, dicts, numbers and strings."""
    return {
        "setup": setup_to_dict(record.setup),
        "name": record.name,
        "baseline": None if record.baseline is None else dict(record.baseline),
        "observations": record.observations.to_dict(),
        "trials": to_plain(record.trials),
        **record.measured.to_dict(),
        "ending": to_plain(record.ending),
    }


def record_from_dict(data: object) -> RunRecord:
    """Read the output of `record_to_dict`.

    Raises:
        HistoryError: the data does not match the schema.
    """
    with prefix_file_errors("the record of a run", HistoryError):
        return _parse_record(data)


def _parse_record(data: object) -> RunRecord:
    values = _RECORD(data)
    measured = {key: values.pop(key) for key in _MEASURED if key in values}
    return RunRecord(**values, measured=ProbeMeasurements(**measured))


#: Maximum number of counts in a histogram of labels.
_MAX_BINS = 256
#: FP32 on the user's data, for `RunRecord.baseline` and the history.
BASELINE_FIGURES = record(
    {"accuracy": keep_original_value(finite)},
    {
        "seconds": non_negative_float,
        "cpu_seconds": non_negative_float,
        "target": optional(keep_original_value(finite)),
        "metrics": mapping_of(number),
        "every": boolean,
        "contents": record(
            {"samples": non_negative_integer, "labels": optional(non_negative_integer)},
            {
                "histogram": list_of(non_negative_integer, most=_MAX_BINS),
                "largest_batch": non_negative_integer,
            },
        ),
        "losses": record({"sums": finite_numbers, "counts": finite_numbers}),
        "deviation": non_negative_float,
        "passes": integer_between(2),
    },
)
_, _MEASURED = build_field_validators(ProbeMeasurements)
_RECORD = record(
    {
        "setup": setup_from_dict,
        "name": string,
        "baseline": optional(BASELINE_FIGURES),
        "observations": Observations.from_dict,
        "trials": list_of(Trial.from_dict),
        "ending": optional(RunEnd.from_dict),
        **{key: value for key, value in _MEASURED.items() if key != "layer_errors"},
    },
    {"layer_errors": _MEASURED["layer_errors"]},
)


def write_record(path: Path, record: RunRecord) -> None:
    """Write a record to a compressed JSON file; equal records yield equal files."""
    path.write_bytes(gzip.compress(json.dumps(record_to_dict(record)).encode(), mtime=0))


def read_record_file(path: Path) -> RunRecord:
    """Read the output of `write_record`.

    Raises:
        HistoryError: the file is missing or damaged.
    """
    return read_json(path, _parse_record, HistoryError)
