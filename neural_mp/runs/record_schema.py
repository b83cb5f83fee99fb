"""Serialization of the record of a run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from neural_mp.core.graph import Layer, Op, OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import parse_plan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizedTensor
from neural_mp.core.trial import Trial
from neural_mp.errors import HistoryError
from neural_mp.io.readers import file_context, read_json
from neural_mp.runs.report import (
    RUNTIME_FIGURES,
    Conversion,
    Machine,
    ProbeMeasurements,
    Report,
    RunEnd,
    RunRecord,
    RunStart,
    Setting,
)
from neural_mp.space import Capability
from neural_mp.util.validators import (
    InvalidValueError,
    boolean,
    checked,
    enum_of,
    finite,
    finite_numbers,
    instance_of,
    integer_between,
    invalid,
    list_of,
    mapping_of,
    non_negative_float,
    non_negative_integer,
    number,
    optional,
    preview,
    record,
    string,
    tuple_of,
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
                **{
                    item.name: value
                    for item in fields(Op)
                    if (value := getattr(op, item.name)) != item.default and item.name != "layers"
                },
                **({"layers": [[part.name, part.type] for part in op.layers]} if op.layers else {}),
                "runs in": [p.value for p in entry.precisions],
                **({"emulated": sorted(p.value for p in entry.emulated)} if entry.emulated else {}),
                **({"why not": why} if why else {}),
            }
        )
    return {
        **{name: getattr(setup, name) for name in ("started", "model", "framework", "batch_size")},
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "ops": ops,
        "reasons": list(reasons),
        "tunable_ops": list(setup.tunable_ops),
        "tensors": [asdict(tensor) for tensor in setup.tensors],
        "fan_in": dict(setup.fan_in),
        "settings": {name: asdict(setting) for name, setting in setup.settings.items()},
        "machine": asdict(setup.machine),
        "versions": dict(setup.versions),
        "runtimes": [asdict(entry) for entry in setup.runtimes],
    }


def setup_from_dict(data: Any) -> RunStart:
    """Read the output of `setup_to_dict`.

    Raises:
        NeuralMPError: the data does not match the schema.
    """
    values = _SETUP(data)
    reasons, stored = values.pop("reasons"), values.pop("ops")
    capabilities = {
        op["name"]: Capability(
            tuple(OpConfig(precision) for precision in op["runs in"]),
            validate_at("ops", _reasons, (op, reasons)),
            frozenset(op.get("emulated", ())),
        )
        for op in stored
    }
    ops = [Op(**{key: op[key] for key in _OP_FIELDS if key in op}) for op in stored]
    graph = OpGraph(ops, values.pop("inputs"), values.pop("outputs"))
    return _consistent(RunStart(**values, graph=graph, capabilities=capabilities))


def _consistent(setup: RunStart) -> RunStart:
    """Return the setup if all its names are in its graph.

    Raises:
        InvalidValueError: a name is not in the graph.
    """
    ops = {op.name for op in setup.graph}
    sources = ops | set(setup.graph.inputs)
    tensors = setup.tensors
    named = {
        "outputs": (setup.graph.outputs, sources),
        "ops.fusion_group": ([op.fusion_group for op in setup.graph if op.fusion_group], ops),
        "tunable_ops": (setup.tunable_ops, ops),
        "fan_in": (setup.fan_in, ops),
        "tensors.name": ([tensor.name for tensor in tensors], sources),
        "tensors.producers": ([op for tensor in tensors for op in tensor.producers], ops),
        "tensors.consumers": ([op for tensor in tensors for op in tensor.consumers], ops),
        "tensors.quantizing_ops": (
            [op for tensor in tensors for op in tensor.quantizing_ops],
            ops,
        ),
    }
    for key, (names, expected) in named.items():
        for name in names:
            if name not in expected:
                raise InvalidValueError(f"{key}: expected the name of an op, found {preview(name)}")
    return setup


def _reasons(given: tuple[Mapping[str, Any], Sequence[str]]) -> dict[Precision, str]:
    """Return precision → reason why an op is ineligible, from the shared list of reasons."""
    op, reasons = given
    parsed = {}
    for name, index in op.get("why not", {}).items():
        if index >= len(reasons):
            raise InvalidValueError(
                f"expected the place of one of {len(reasons)} reasons, found {index}"
            )
        parsed[Precision.parse(name, "a precision", InvalidValueError)] = reasons[index]
    return parsed


def _layer(value: Any) -> Layer:
    return Layer(*tuple_of(string, string)(value))


_NAMES = list_of(string)
_OP_FIELDS = tuple(Op.__dataclass_fields__)
_OP = record(
    {"name": string, "type": string, "runs in": list_of(enum_of(Precision))},
    {
        "inputs": _NAMES,
        "fusion_group": string,
        **dict.fromkeys(
            ("quantize_agnostic", "writes_int8", "joins_int8", "channel_scales"), boolean
        ),
        **dict.fromkeys(("quantizes_terms", "widened"), boolean),
        "source_precision": enum_of(Precision),
        "shape": optional(list_of(optional(non_negative_integer))),
        **dict.fromkeys(("quantized_inputs", "constants"), _NAMES),
        "weights": non_negative_integer,
        "layers": list_of(_layer),
        "emulated": list_of(enum_of(Precision)),
        "why not": mapping_of(non_negative_integer),
    },
)
_TENSOR = record(
    {"name": string, "producers": _NAMES, "consumers": _NAMES}, {"quantizing_ops": _NAMES}
)
_SETTING = record({"value": string}, {"origin": string})
_MACHINE = record(
    {
        "name": string,
        "cores": non_negative_integer,
        "flags": _NAMES,
        "supports": mapping_of(tuple_of(string, string)),
        "system": string,
    }
)
_SETUP = record(
    {
        **dict.fromkeys(("started", "model", "framework"), string),
        "batch_size": non_negative_integer,
        **dict.fromkeys(("inputs", "outputs", "reasons", "tunable_ops"), _NAMES),
        "ops": list_of(_OP),
        "tensors": list_of(instance_of(QuantizedTensor, _TENSOR)),
        "fan_in": mapping_of(non_negative_integer),
        "settings": mapping_of(instance_of(Setting, _SETTING)),
        "machine": instance_of(Machine, _MACHINE),
        "versions": mapping_of(string),
    },
    {"runtimes": RUNTIME_FIGURES},
)


def ending_to_dict(ending: RunEnd) -> dict[str, Any]:
    """Return a `RunEnd` as plain lists, dicts, numbers and strings."""
    return {
        "ended": ending.ended,
        "met": ending.met,
        "plan": ending.plan.to_dict(),
        "report": ending.report.to_dict(),
        "chosen": ending.chosen,
        "finalists": [trial.to_dict() for trial in ending.finalists],
        "predicted": {str(number): time for number, time in ending.predicted.items()},
        "baseline_times": dict(ending.baseline_times),
        "result_times": dict(ending.result_times),
        "conversions": [asdict(conversion) for conversion in ending.conversions],
        "timed_samples": ending.timed_samples,
    }


def _predicted(value: Any) -> dict[int, float]:
    times = mapping_of(number)(value)
    wrong = next((key for key in times if not (key.isdecimal() and len(key) < 10)), None)
    if wrong is not None:
        raise invalid("the number of a trial", wrong)
    return {int(key): time for key, time in times.items()}


_CONVERSION = record(
    {"source": string, "readers": _NAMES, "kind": string, "seconds": optional(non_negative_float)}
)
#: Validator of the output of `ending_to_dict`.
ending_from_dict = instance_of(
    RunEnd,
    record(
        {
            "ended": string,
            "met": optional(boolean),
            "plan": parse_plan,
            "report": Report.from_dict,
            "chosen": optional(non_negative_integer),
            "finalists": list_of(Trial.from_dict),
            "predicted": _predicted,
            "baseline_times": mapping_of(non_negative_float),
            "result_times": mapping_of(non_negative_float),
            "conversions": list_of(instance_of(Conversion, _CONVERSION)),
        },
        {"timed_samples": optional(non_negative_integer)},
    ),
)


def record_to_dict(record: RunRecord) -> dict[str, Any]:
    """Return a whole record as plain lists, dicts, numbers and strings."""
    return {
        "setup": setup_to_dict(record.setup),
        "name": record.name,
        "baseline": None if record.baseline is None else dict(record.baseline),
        "observations": record.observations.to_dict(),
        "trials": [trial.to_dict() for trial in record.trials],
        "times": record.measured.times.to_dict(),
        "output_nsr": {name: dict(by) for name, by in record.measured.output_nsr.items()},
        "elements": dict(record.measured.elements),
        "layer_errors": {op: dict(errors) for op, errors in record.measured.layer_errors.items()},
        "ending": None if record.ending is None else ending_to_dict(record.ending),
    }


def record_from_dict(data: Any) -> RunRecord:
    """Read the output of `record_to_dict`.

    Raises:
        HistoryError: the data does not match the schema.
    """
    with file_context("the record of a run", HistoryError):
        return _record(data)


def _record(data: Any) -> RunRecord:
    values = _RECORD(data)
    measured = [values.pop(key) for key in ("times", "output_nsr", "elements")]
    measured.append(values.pop("layer_errors", {}))
    return RunRecord(**values, measured=ProbeMeasurements(*measured))


#: Maximum number of counts in a histogram of labels.
_MAX_BINS = 256
#: FP32 on the user's data, for `RunRecord.baseline` and the history.
BASELINE_FIGURES = record(
    {"accuracy": checked(finite)},
    {
        "seconds": non_negative_float,
        "cpu_seconds": non_negative_float,
        "target": optional(checked(finite)),
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
_RECORD = record(
    {
        "setup": setup_from_dict,
        "name": string,
        "baseline": optional(BASELINE_FIGURES),
        "observations": Observations.from_dict,
        "trials": list_of(Trial.from_dict),
        "times": OpTimings.from_dict,
        "output_nsr": mapping_of(mapping_of(number)),
        "elements": mapping_of(non_negative_float),
        "ending": optional(ending_from_dict),
    },
    # Missing in files of earlier versions.
    {"layer_errors": mapping_of(mapping_of(non_negative_float))},
)


def write_record(path: Path, record: RunRecord) -> None:
    """Write a record to a compressed JSON file.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(record_to_dict(record))
    # No timestamp: equal records yield equal files.
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_record_file(path: Path) -> RunRecord:
    """Read the output of `write_record`.

    Raises:
        HistoryError: the file is missing or damaged.
    """
    return read_json(path, _record, HistoryError)
