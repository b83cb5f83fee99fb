"""The record of a run as plain lists, dicts, numbers and strings, and read back."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from neural_mp.core.graph import Layer, Op, OpGraph
from neural_mp.core.observations import Observations, Times
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizedTensor
from neural_mp.core.trial import Trial
from neural_mp.errors import HistoryError
from neural_mp.space import Capability
from neural_mp.tuning.record import (
    Conversion,
    Ending,
    Machine,
    Measured,
    RunRecord,
    Setting,
    Setup,
)
from neural_mp.tuning.report import Report

T = TypeVar("T")


def setup_to_dict(setup: Setup) -> dict[str, Any]:
    """A setup as plain lists, dicts, numbers and strings."""
    graph = setup.graph
    reasons: dict[str, int] = {}  # most ops give one of a few
    ops = []
    for op in graph:
        known = setup.capabilities[op.name]
        why = {p.value: reasons.setdefault(w, len(reasons)) for p, w in known.reasons.items()}
        ops.append(
            {
                **{name: value for name, value in vars(op).items() if value and name != "layers"},
                **({"layers": [[part.name, part.type] for part in op.layers]} if op.layers else {}),
                "runs in": [p.value for p in known.precisions],
                **({"emulated": sorted(p.value for p in known.emulated)} if known.emulated else {}),
                **({"why not": why} if why else {}),
            }
        )
    return {
        **{name: getattr(setup, name) for name in ("started", "model", "framework", "batch_size")},
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "ops": ops,
        "reasons": list(reasons),
        "decided": list(setup.decided),
        "tensors": [asdict(tensor) for tensor in setup.tensors],
        "fan_in": dict(setup.fan_in),
        "settings": {name: asdict(setting) for name, setting in setup.settings.items()},
        "machine": asdict(setup.machine),
        "versions": dict(setup.versions),
    }


def setup_from_dict(data: Mapping[str, Any]) -> Setup:
    """Read back what `setup_to_dict` wrote.

    Raises:
        HistoryError: it was not written so.
    """
    return _read("the start of a run", _setup, data)


def _setup(data: Mapping[str, Any]) -> Setup:
    ops, capabilities = [], {}
    for said in data["ops"]:
        fields = {name: value for name, value in said.items() if name in Op.__dataclass_fields__}
        fields["inputs"] = tuple(said.get("inputs", ()))
        fields["layers"] = tuple(Layer(*part) for part in said.get("layers", ()))
        ops.append(Op(**fields))
        capabilities[said["name"]] = Capability(
            tuple(OpConfig(Precision(word)) for word in said["runs in"]),
            {Precision(p): data["reasons"][w] for p, w in said.get("why not", {}).items()},
            frozenset(map(Precision, said.get("emulated", ()))),
        )
    machine = dict(data["machine"])
    machine["flags"] = tuple(machine["flags"])
    machine["supports"] = {p: (how, why) for p, (how, why) in machine["supports"].items()}
    return Setup(
        **{name: data[name] for name in ("started", "model", "framework", "batch_size")},
        graph=OpGraph(ops, data["inputs"], data["outputs"]),
        capabilities=capabilities,
        decided=tuple(data["decided"]),
        tensors=tuple(
            QuantizedTensor(
                t["name"], *(tuple(t[k]) for k in ("producers", "consumers", "keepers"))
            )
            for t in data["tensors"]
        ),
        fan_in={str(op): int(count) for op, count in data["fan_in"].items()},
        settings={name: Setting(**said) for name, said in data["settings"].items()},
        machine=Machine(**machine),
        versions=dict(data["versions"]),
    )


def ending_to_dict(ending: Ending) -> dict[str, Any]:
    """An ending as plain lists, dicts, numbers and strings."""
    return {
        "ended": ending.ended,
        "met": ending.met,
        "plan": ending.plan.to_dict(),
        "report": ending.report.to_dict(),
        "chosen": ending.chosen,
        "finalists": [trial.to_dict() for trial in ending.finalists],
        "predicted": {str(number): share for number, share in ending.predicted.items()},
        "baseline_times": dict(ending.baseline_times),
        "result_times": dict(ending.result_times),
        "conversions": [asdict(conversion) for conversion in ending.conversions],
    }


def ending_from_dict(data: Mapping[str, Any]) -> Ending:
    """Read back what `ending_to_dict` wrote.

    Raises:
        HistoryError: it was not written so.
    """
    return _read("the end of a run", _ending, data)


def _ending(data: Mapping[str, Any]) -> Ending:
    return Ending(
        data["ended"],
        data["met"],
        PrecisionPlan.from_dict(data["plan"]),
        Report.from_dict(data["report"]),
        data["chosen"],
        tuple(Trial.from_dict(trial) for trial in data["finalists"]),
        {int(number): share for number, share in data["predicted"].items()},
        dict(data["baseline_times"]),
        dict(data["result_times"]),
        tuple(
            Conversion(c["source"], tuple(c["readers"]), c["kind"], c["seconds"])
            for c in data["conversions"]
        ),
    )


def record_to_dict(record: RunRecord) -> dict[str, Any]:
    """A whole record as plain lists, dicts, numbers and strings."""
    return {
        "setup": setup_to_dict(record.setup),
        "name": record.name,
        "baseline": None if record.baseline is None else dict(record.baseline),
        "observations": record.observations.to_dict(),
        "trials": [trial.to_dict() for trial in record.trials],
        "times": record.measured.times.to_dict(),
        "arriving": {name: dict(by) for name, by in record.measured.arriving.items()},
        "values": dict(record.measured.values),
        "ending": None if record.ending is None else ending_to_dict(record.ending),
    }


def record_from_dict(data: Mapping[str, Any]) -> RunRecord:
    """Read back what `record_to_dict` wrote.

    Raises:
        HistoryError: it was not written so.
    """
    return _read("the record of a run", _record, data)


def write_record(path: Path, record: RunRecord) -> None:
    """Write a record into a compressed JSON file.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(record_to_dict(record))
    # Without the time in it, so that the same record gives the same file.
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_record_file(path: Path) -> RunRecord:
    """Read back what `write_record` wrote.

    Raises:
        HistoryError: the file is missing or damaged.
    """
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise HistoryError(f"the record {str(path)!r} cannot be read: {error}") from None
    return record_from_dict(data)


def _record(data: Mapping[str, Any]) -> RunRecord:
    return RunRecord(
        _setup(data["setup"]),
        data["name"],
        data["baseline"],
        Observations.from_dict(data["observations"]),
        tuple(Trial.from_dict(trial) for trial in data["trials"]),
        Measured(Times.from_dict(data["times"]), dict(data["arriving"]), dict(data["values"])),
        None if data["ending"] is None else _ending(data["ending"]),
    )


def _read(what: str, reader: Callable[[Mapping[str, Any]], T], data: Mapping[str, Any]) -> T:
    try:
        return reader(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise HistoryError(
            f"{what} cannot be read: {type(error).__name__}: {error}; it was damaged, or written "
            f"by another version"
        ) from None
