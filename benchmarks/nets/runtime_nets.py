"""The models of `runtimes.py` in torch and their samples, and drawn nets by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.nets.architecture_nets import ARCHITECTURES
from benchmarks.nets.bert import bert_base
from benchmarks.nets.case import Arrays, Case
from benchmarks.nets.drawn_nets import drawn_case
from benchmarks.nets.vision_nets import images, torch_net


def _pictures(count: int, seed: int) -> Arrays:
    return (images(count, seed),)


def _sentences(count: int, seed: int) -> Arrays:
    tokens = np.random.default_rng(seed).integers(0, 30000, (count, 128))
    return tokens, np.ones_like(tokens)


CASES = {
    "resnet50": Case(lambda: torch_net("resnet50"), _pictures, batches=(1, 32)),
    "bert": Case(bert_base, _sentences, ("input_ids", "attention_mask"), (1, 4), 16),
    "mobilenetv2": Case(lambda: torch_net("mobilenetv2"), _pictures),
    "efficientnetb0": Case(lambda: torch_net("efficientnetb0"), _pictures),
}
#: Samples for calibration, of these as many at once; the seeds of the samples of each use.
CALIBRATION, AT_ONCE = 32, 8
CALIBRATED, JUDGED, TIMED = 1, 99, 7


def case_of(name: str) -> Case:
    """Return one of the four models, of the twelve architectures, or a drawn net."""
    fixed = CASES | ARCHITECTURES
    return fixed[name] if name in fixed else drawn_case(name)


def write_sources(name: str, folder: Path) -> None:
    """Write the model as ONNX and, per batch size, as exported program, and calibration samples.

    The ONNX file takes the first batch size only where torch exports no other.
    """
    case = case_of(name)
    net, batch = case.build(), torch.export.Dim("batch")
    try:
        _write_onnx(net, case, 2, tuple({0: batch} for _ in case.names), folder)
    except torch.onnx.OnnxExporterError:
        _write_onnx(net, case, case.batches[0], None, folder)
    for size in case.batches:
        program = torch.export.export(net, tuple(map(torch.from_numpy, case.draw(size, TIMED))))
        torch.export.save(program, folder / f"{size}.pt2")
    samples = case.draw(CALIBRATION, CALIBRATED)
    np.savez(folder / "calibration.npz", **dict(zip(case.names, samples, strict=True)))


def _write_onnx(net: nn.Module, case: Case, size: int, shapes: Any, folder: Path) -> None:
    torch.onnx.export(
        net,
        tuple(map(torch.from_numpy, case.draw(size, TIMED))),
        str(folder / "fp32.onnx"),
        input_names=list(case.names),
        output_names=["result"],
        dynamic_shapes=shapes,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def reference(name: str) -> tuple[nn.Module, np.ndarray]:
    """Return the model, and its outputs for the samples that outputs are compared on."""
    case = case_of(name)
    net, outputs = case.build(), []
    with torch.inference_mode():
        for inputs in case.cut(case.judged, JUDGED, 4):
            outputs.append(net(*map(torch.from_numpy, inputs)).numpy())
    return net, np.concatenate(outputs)


def noise(expected: Any, actual: Any) -> float:
    """Return the power of the difference, as a fraction of that of the expected values."""
    expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    return float(np.square(expected - actual).sum() / np.square(expected).sum())
