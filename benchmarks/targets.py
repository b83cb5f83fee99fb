"""Plans for accelerators, beside presets of other tools: loss, widths, evaluations, emulation.

    python -m benchmarks.targets [--target qnn] [--tolerance 0.01] [--seed 20261129]
                                 [--only NET…] [--emulated 12] [--quark PYTHON]

Six nets are those that packages ship (extra `bench`), six are trained from a seed, by default the
date. Losses are fractions of FP32's metric, in simulation on the CPU. The peers are
`get_qnn_qdq_config` of onnxruntime in W8A8 and W8A16 or, with `--quark`, the presets XINT8, A8W8
and A16W8 of AMD Quark, by the interpreter of an environment of its own. With onnxruntime-qnn
installed, the files of ours are compiled and run by the emulated NPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import (
    get_qnn_qdq_config,
    qnn_preprocess_model,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from rich.console import Console
from rich.table import Table

from benchmarks.accelerators.shipped import SHIPPED
from benchmarks.accelerators.trained import RECIPES, trained_case
from benchmarks.measurement.tables import make_table
from benchmarks.peers import amd_quark
from benchmarks.real.case import Batches, Case, Metric
from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt.targets.audit.file_audit import FileAudit, audit_file, simulate_file
from neural_mp.runs.report import Report
from neural_mp.targets import load_profile

#: Preset → types of activations and weights.
PRESETS = {
    "W8A8": (QuantType.QUInt8, QuantType.QUInt8),
    "W8A16": (QuantType.QUInt16, QuantType.QUInt8),
}
Feeds = Mapping[str, np.ndarray]
#: Samples of small nets that are emulated for each of the others.
_SMALL_NETS_RATIO = 12


NAMES = (*SHIPPED, *RECIPES)


class Samples(CalibrationDataReader):
    """Batches of inputs by name, as the tools of ONNX Runtime and of AMD read them."""

    def __init__(self, feeds: list[Feeds]) -> None:
        self._feeds = feeds
        self.rewind()

    def rewind(self) -> None:
        """Start again."""
        self._waiting: Iterator[Feeds] = iter(self._feeds)

    def get_next(self) -> Feeds | None:
        """Return the next batch, as the base class asks for."""
        return next(self._waiting, None)


def feeds_of(path: Path, batches: Batches) -> list[Feeds]:
    """Return the inputs of all batches by name."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    names = [value.name for value in graph.input if value.name not in constants]
    return [x if isinstance(x, Mapping) else {names[0]: x} for x, _ in batches]


def write_preset(path: Path, calibration: Batches, preset: str, file: Path) -> None:
    """Write a net quantized by a preset."""
    activation, weight = PRESETS[preset]
    prepared = _prepared(path, file)
    config = get_qnn_qdq_config(
        prepared,
        Samples(feeds_of(path, calibration)),
        activation_type=activation,
        weight_type=weight,
    )
    quantize(prepared, file, config)


def _prepared(path: Path, file: Path) -> Path:
    """Return the net after both steps that the documentation asks for, as far as they succeed."""
    folded = file.with_suffix(".folded.onnx")
    try:
        quant_pre_process(path, folded, skip_symbolic_shape=True)
        model = onnx.load(folded)
        del model.metadata_props[:]  # on which the next step fails
        onnx.save(model, folded)
        path, prepared = folded, file.with_suffix(".qnn.onnx")
        if qnn_preprocess_model(path, prepared):
            return prepared
    except Exception as error:  # noqa: BLE001 – whatever the parts of the tool raise
        Console().print(f"preparation for presets: {type(error).__name__}: {str(error)[:100]}")
    return path


def quality_of(path: Path, batches: Batches, metric: Metric) -> float:
    """Return the metric of a file that the CPU provider computes as written."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    metric.reset()
    for feeds, (_, labels) in zip(feeds_of(path, batches), batches, strict=True):
        outputs = session.run(None, dict(feeds))
        metric.update(outputs[0] if len(outputs) == 1 else outputs, labels)
    return metric.result()


def case_named(name: str, seed: int) -> Case:
    """Return a net with its data and metric; `seed` is that of trained nets."""
    case = SHIPPED[name] if name in SHIPPED else trained_case(name, seed)
    return replace(case, batches=cache(case.batches))


class TimedBatches:
    """Batches, with the CPU seconds at which each complete pass began and ended."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.batch_size = batches, batches.batch_size
        self.passes: list[tuple[float, float]] = []

    def __iter__(self) -> Iterator[Any]:
        begun = time.process_time()
        yield from self.batches
        self.passes.append((begun, time.process_time()))

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def ends(self) -> list[float]:
        """The ends of all evaluations: a pass that only reads the data is far shorter."""
        longest = max(end - begun for begun, end in self.passes)
        return [end for begun, end in self.passes if end - begun > longest / 10]


@dataclass(frozen=True)
class Emulation:
    """Result of the target's compiler for a file.

    Attributes:
        refused: nodes that the target does not take.
        floats: ops that the plan has in integers, computed in float.
        findings: all findings of the audit.
        sqnr_db: agreement of the outputs with the simulation; None if not compared.
        difference: metric in simulation less that in emulation, on the samples.
        error: why there is no result.
    """

    refused: int | None = None
    floats: int | None = None
    findings: int | None = None
    sqnr_db: float | None = None
    difference: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Row:
    """The figures of one net; None where there is none.

    Attributes:
        fp32: the metric of FP32.
        peers: preset → loss, as a fraction of FP32's metric; None if the preset failed.
        loss: that of the plan; None if the target was missed.
        widths: fraction of multiplications by width.
        evaluations: plans tried.
        search_ratio: CPU seconds of the run after FP32's evaluation, over those of its first part,
            which calibrates, writes one plan and evaluates the file.
        run_ratio: CPU seconds of the whole run over the same.
        seconds: stage of the run → wall seconds; CPU seconds of `spent`, `searched` and `plain`.
    """

    name: str
    fp32: float = 0.0
    peers: Mapping[str, float | None] = field(default_factory=dict)
    loss: float | None = None
    widths: Mapping[str, float] = field(default_factory=dict)
    evaluations: int = 0
    search_ratio: float = 0.0
    run_ratio: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    emulation: Emulation = Emulation()
    error: str = ""

    @property
    def narrow(self) -> float:
        """Fraction of multiplications in 8 × 8."""
        return self.widths.get("w8a8", 0.0)


def measured(name: str, options: argparse.Namespace, folder: Path) -> Row:
    """Return the figures of a net."""
    case = case_named(name, options.seed)
    path = Path(case.source(folder))
    calibration, evaluation = case.batches("calibration"), case.batches("test")
    fp32 = quality_of(path, evaluation, case.metric())
    Console().print(f"{name}: FP32 {fp32:.4f}")
    peers = peer_losses(path, case, fp32, options, folder)
    Console().print(f"{name}: presets {peers}")
    timed = TimedBatches(evaluation)
    begun = time.process_time()
    result = MixedPrecision(
        model=str(path),
        target=options.target,
        metric=case.metric(),
        calib_dataloader=calibration,
        eval_dataloader=timed,
        accuracy_criterion={"relative": options.tolerance},
        cache=False,
        workspace=str(folder / "workspace"),
    )()
    ended = time.process_time()
    of_fp32, of_first, *_ = timed.ends
    spent, searched, plain = ended - begun, ended - of_fp32, of_first - of_fp32
    file = folder / "planned.onnx"
    result.save(file)
    return Row(
        name,
        fp32,
        peers,
        (fp32 - result.report.accuracy) / fp32 if result.met else None,
        shares_of(result.report),
        len(result.trials),
        searched / plain,
        spent / plain,
        {**result.report.seconds, "spent": spent, "searched": searched, "plain": plain},
        emulated(name, file, case, options) if result.met else Emulation(error="missed"),
    )


def shares_of(report: Report) -> dict[str, float]:
    """Return width → fraction of multiplications."""
    return {} if report.accelerator is None else dict(report.accelerator.shares)


def peer_losses(
    path: Path, case: Case, fp32: float, options: argparse.Namespace, folder: Path
) -> dict[str, float | None]:
    """Return preset → loss, as a fraction of FP32's metric; None for a preset that fails."""
    calibration, losses = case.batches("calibration"), dict[str, float | None]()
    for preset in peers_of(options):
        file = folder / f"{preset}.onnx"
        try:
            if options.quark is None:
                write_preset(path, calibration, preset, file)
            else:
                amd_quark.write_preset(
                    options.quark, path, feeds_of(path, calibration), preset, file
                )
            quality = quality_of(file, case.batches("test"), case.metric())
        except Exception as error:  # noqa: BLE001 – tools raise whatever their parts raise
            Console().print(f"{preset} failed: {type(error).__name__}: {str(error)[:200]}")
            losses[preset] = None
        else:
            losses[preset] = (fp32 - quality) / fp32
    return losses


def peers_of(options: argparse.Namespace) -> Sequence[str]:
    """Return the names of the presets beside."""
    return tuple(PRESETS) if options.quark is None else amd_quark.PRESETS


def emulated(name: str, file: Path, case: Case, options: argparse.Namespace) -> Emulation:
    """Return the result of the target's compiler on a few samples of the evaluation."""
    model, count = onnx.load(file), options.emulated
    if name not in SHIPPED:
        count *= _SMALL_NETS_RATIO
    try:
        samples = samples_of(model, case, count)
        feeds = [feeds for feeds, _ in samples]
        audit = audit_file(file, load_profile(options.target), feeds, count)
    except Exception as error:  # noqa: BLE001 – shown in the table
        return Emulation(error=f"{type(error).__name__}: {str(error)[:100]}")
    if audit.compiled is None:
        return Emulation(findings=len(audit.findings), error="not compiled")
    for finding in audit.findings:
        Console().print(f"  finding: {finding.message}")
    metrics = []
    for outputs in (simulate_file(model, feeds), audit.compiled.outputs):
        metric = case.metric()
        for arrays, (_, labels) in zip(outputs, samples, strict=True):
            values = list(arrays.values())
            metric.update(values[0] if len(values) == 1 else values, labels)
        metrics.append(metric.result())
    return _emulation_of(audit, metrics[0] - metrics[1])


def _emulation_of(audit: FileAudit, difference: float) -> Emulation:
    compiled = audit.compiled
    assert compiled is not None
    floats = sum(finding.rule == "float_kernel" for finding in audit.findings)
    return Emulation(
        len(compiled.refused), floats, len(audit.findings), compiled.sqnr_db, difference
    )


def samples_of(
    model: onnx.ModelProto, case: Case, count: int
) -> list[tuple[dict[str, np.ndarray], Any]]:
    """Return inputs of the sizes of a file, with labels, spread over the evaluation."""
    sizes = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    batches = list(case.batches("test"))
    places = [(x, y, i) for x, y in batches for i in range(len(y))]
    chosen = np.linspace(0, len(places) - 1, count).astype(int)
    return [_sample_of(*places[place], sizes) for place in chosen]


def _sample_of(
    inputs: Any, labels: Any, index: int, sizes: Mapping[str, list[int]]
) -> tuple[dict[str, np.ndarray], Any]:
    by_name = inputs if isinstance(inputs, Mapping) else {next(iter(sizes)): inputs}
    part = slice(index, index + 1)
    feeds = {
        name: by_name[name][part] if len(by_name[name]) == len(labels) else by_name[name]
        for name in sizes
    }
    return feeds, labels[part]


def table_of(rows: list[Row], options: argparse.Namespace) -> Table:
    """Return the table of all nets."""
    losses = [f"loss of {name}" for name in (*peers_of(options), "ours")]
    columns = ("emulated less", "SQNR", "MACs in 8×8", "evaluations", "search", "run")
    title = f"target {options.target}, tolerated loss {options.tolerance:.1%}"
    table = make_table(title, "net", "FP32", *losses, *columns, "refused", "in float")
    for row in rows:
        table.add_row(*cells_of(row))
    table.caption = (
        "search, run: CPU seconds of each, over those of one calibration, file and evaluation"
    )
    return table


def cells_of(row: Row) -> list[str]:
    """Return the figures of a row as text."""
    if row.error:
        return [row.name, row.error[:60]]
    emulation = row.emulation
    points = "–" if emulation.difference is None else f"{100 * emulation.difference:.2f}"
    return [
        row.name,
        f"{row.fp32:.4f}",
        *("failed" if loss is None else f"{loss:.2%}" for loss in row.peers.values()),
        "missed" if row.loss is None else f"{row.loss:.2%}",
        points,
        "–" if emulation.sqnr_db is None else f"{emulation.sqnr_db:.0f} dB",
        f"{row.narrow:.0%}",
        str(row.evaluations),
        f"{row.search_ratio:.1f}×",
        f"{row.run_ratio:.1f}×",
        emulation.error if emulation.refused is None else str(emulation.refused),
        "–" if emulation.floats is None else str(emulation.floats),
    ]


def main() -> None:
    """Plan all nets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--target", default="qnn")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of FP32's metric")
    parser.add_argument("--seed", type=int, default=today, help="by default, the date")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--emulated", type=int, default=12, help="samples of a shipped net for the NPU"
    )
    parser.add_argument("--quark", help="interpreter with amd-quark, whose presets are the peers")
    parser.add_argument("--json", type=Path, help="file for the figures of each net, line by line")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(measured(name, options, Path(folder)))
            except Exception as error:  # noqa: BLE001 – a net that fails is a row of the table
                Console().print_exception()
                rows.append(Row(name, error=f"{type(error).__name__}: {error}"))
        Console().print(rows[-1])
        if options.json is not None:
            with options.json.open("a") as lines:
                lines.write(json.dumps(asdict(rows[-1])) + "\n")
    Console(width=180).print(table_of(rows, options))


if __name__ == "__main__":
    main()
