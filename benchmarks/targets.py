"""Plans for accelerators, beside ONNX Runtime's presets: loss, widths, evaluations, emulation.

    python -m benchmarks.targets [--target qnn] [--tolerance 0.01] [--seed 20261129]
                                 [--only NET…] [--emulated 4]

Nets of `benchmarks.nets.digit_nets` are trained from a seed, by default the date, and written as
ONNX. The peers are `get_qnn_qdq_config` of onnxruntime in W8A8 and W8A16; losses are fractions of
FP32's metric, in simulation on the CPU. With onnxruntime-qnn installed, the files of ours are
compiled and run by the emulated NPU.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
from rich.console import Console
from rich.table import Table

from benchmarks.nets.digit_nets import NETS, DigitCase, trained_case
from neural_mp import MixedPrecision
from neural_mp.api.target_audit import audit_file

_BATCH = 100
#: Presets of ONNX Runtime: name → types of activations and weights.
PRESETS = {
    "W8A8": (QuantType.QUInt8, QuantType.QUInt8),
    "W8A16": (QuantType.QUInt16, QuantType.QUInt8),
}


class Quality:
    """Accuracy, or the intersection over union of masks; higher is better."""

    higher_is_better = True

    def __init__(self, is_segmentation: bool) -> None:
        self.is_segmentation = is_segmentation
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.right = self.all = 0

    def update(self, preds: Any, labels: Any) -> None:
        """Add a batch."""
        outputs, expected = np.asarray(preds), np.asarray(labels)
        if self.is_segmentation:
            mask, reference = outputs > 0, expected > 0.5
            self.right += int((mask & reference).sum())
            self.all += int((mask | reference).sum())
        else:
            self.right += int((outputs.argmax(1) == expected).sum())
            self.all += len(expected)

    def result(self) -> float:
        """Return the metric over all batches."""
        return self.right / self.all


class _Samples(CalibrationDataReader):
    def __init__(self, case: DigitCase) -> None:
        self._samples: Iterator[np.ndarray] = iter(case.calibration)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next sample, as the base class asks for."""
        sample = next(self._samples, None)
        return None if sample is None else {"x": sample[None]}


@dataclass(frozen=True)
class Row:
    """The figures of one net."""

    name: str
    fp32: float
    presets: dict[str, float]
    loss: float | None
    narrow: float
    evaluations: int
    seconds_ratio: float
    emulation: str


def written(case: DigitCase, path: Path) -> None:
    """Write a net as ONNX, with an open batch."""
    torch.onnx.export(
        case.net,
        (torch.tensor(case.evaluation[:2]),),
        path,
        input_names=["x"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=21,
        external_data=False,
        verbose=False,
        dynamo=True,
    )


def quality_of(model: onnx.ModelProto, case: DigitCase) -> float:
    """Return the metric of a file that the CPU provider computes as written."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    metric = Quality(case.is_segmentation)
    for start in range(0, len(case.evaluation), _BATCH):
        part = slice(start, start + _BATCH)
        metric.update(session.run(None, {"x": case.evaluation[part]})[0], case.labels[part])
    return metric.result()


def preset_loss(path: Path, case: DigitCase, preset: str, fp32: float) -> float:
    """Return the loss of a preset of ONNX Runtime, as a fraction of FP32's metric."""
    activation, weight = PRESETS[preset]
    quantized = path.with_suffix(f".{preset}.onnx")
    config = get_qnn_qdq_config(
        path, _Samples(case), activation_type=activation, weight_type=weight
    )
    quantize(path, quantized, config)
    return (fp32 - quality_of(onnx.load(quantized), case)) / fp32


def batches(inputs: np.ndarray, labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of inputs and labels."""
    starts = range(0, len(inputs), _BATCH)
    return [(inputs[s : s + _BATCH], labels[s : s + _BATCH]) for s in starts]


def measured(name: str, options: argparse.Namespace, folder: Path) -> Row:
    """Return the figures of a net."""
    case, path = trained_case(name, options.seed), folder / "net.onnx"
    written(case, path)
    fp32 = quality_of(onnx.load(path), case)
    presets = {preset: preset_loss(path, case, preset, fp32) for preset in PRESETS}
    begun = time.process_time()
    result = MixedPrecision(
        model=str(path),
        target=options.target,
        metric=Quality(case.is_segmentation),
        eval_dataloader=batches(case.evaluation, case.labels),
        calib_dataloader=batches(case.calibration, np.zeros(len(case.calibration))),
        accuracy_criterion={"relative": options.tolerance},
        cache=False,
        workspace=str(folder / "workspace"),
    )()
    spent = time.process_time() - begun
    seconds = result.report.seconds
    plain = seconds.get("calibrate", 0.0) + seconds.get("baseline", 0.0)
    file = folder / "planned.onnx"
    result.save(file)
    figures = result.report.accelerator
    shares = {} if figures is None else figures.shares
    return Row(
        name,
        fp32,
        presets,
        (fp32 - result.report.accuracy) / fp32 if result.met else None,
        shares.get("w8a8", 0.0),
        len(result.trials),
        spent / plain if plain else 0.0,
        emulated_words(file, options) if result.met else "–",
    )


def emulated_words(file: Path, options: argparse.Namespace) -> str:
    """Return the result of the target's compiler: nodes refused, findings and SQNR."""
    audit = audit_file(file, options.target, samples=options.emulated)
    if audit.compiled is None:
        return f"{len(audit.findings)} findings, not compiled"
    refused = len(audit.compiled.refused)
    noise = audit.compiled.sqnr_db or float("nan")
    return f"{refused} refused, {len(audit.findings)} findings, {noise:.1f} dB"


def table_of(rows: list[Row], options: argparse.Namespace) -> Table:
    """Return the table of all nets."""
    table = Table(title=f"target {options.target}, tolerated loss {options.tolerance:.1%}")
    headings = ("net", "FP32", *(f"loss of {name}" for name in PRESETS), "loss of ours")
    for heading in (*headings, "MACs in 8×8", "evaluations", "time", "emulation"):
        table.add_column(heading, justify="left" if heading in ("net", "emulation") else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.fp32:.4f}",
            *(f"{row.presets[name]:.2%}" for name in PRESETS),
            "missed" if row.loss is None else f"{row.loss:.2%}",
            f"{row.narrow:.0%}",
            str(row.evaluations),
            f"{row.seconds_ratio:.1f}×",
            row.emulation,
        )
    table.caption = "time: of the whole run, over calibration and one evaluation of FP32"
    return table


def main() -> None:
    """Train the nets, plan them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--target", default="qnn")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of FP32's metric")
    parser.add_argument("--seed", type=int, default=today, help="by default, the date")
    parser.add_argument("--only", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--emulated", type=int, default=4, help="samples for the emulated NPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(name, options, Path(folder)))
            Console().print(rows[-1])
    Console(width=160).print(table_of(rows, options))


if __name__ == "__main__":
    main()
