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
from benchmarks.nets.export import write_onnx
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


def write_source(name: str, folder: Path) -> None:
    """Write the model as ONNX, and calibration samples.

    The file takes the first batch size only where torch exports no other.
    """
    case = case_of(name)
    net, path = case.build(), folder / "fp32.onnx"
    try:
        write_onnx(net, _named(case, 2, TIMED), path)
    except torch.onnx.OnnxExporterError:
        write_onnx(net, _named(case, case.batches[0], TIMED), path, free=None)
    np.savez(folder / "calibration.npz", **_named(case, CALIBRATION, CALIBRATED))


def _named(case: Case, count: int, seed: int) -> dict[str, np.ndarray]:
    return dict(zip(case.names, case.draw(count, seed), strict=True))


def write_program(name: str, folder: Path, size: int) -> None:
    """Write the model as exported program of a batch size."""
    case = case_of(name)
    example = tuple(map(torch.from_numpy, case.draw(size, TIMED)))
    torch.export.save(torch.export.export(case.build(), example), folder / f"{size}.pt2")


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
