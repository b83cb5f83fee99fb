"""Metrics in files of Intel Neural Compressor: our values against those of its own code.

    python tests/compat/inc_metric_values.py --repository /path/to/neural-compressor [--rounds 20]

The repository is a checkout of release 1.14; its metrics are imported from there, without the rest
of the package. They were written for older libraries: `np.float` and the functions for GLUE, which
transformers 5 no longer has, are put in place (the latter from the repository's own examples).
Predictions and labels are random, given in several batches.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.compat.inc.components.metrics_detection import CATEGORIES
from neural_mp.metrics import build_metric

Batches = list[tuple[Any, Any]]
Draw = np.random.Generator
#: One row: metric, framework (theirs), options, what it is given, and why it may differ.
Case = tuple[str, str, dict[str, Any], Callable[[Draw], Batches], str]
WORDS = [
    "the",
    "a",
    "An",
    "cat's",
    "dog,",
    "Über",
    "3.5%",
    "1,000",
    "house",
    "–",
    "»tree«",
    "$5",
    "a\\b",
    "end.",
]
TOLERANCE = 1e-6


class Lazy:
    """Their `LazyImport`: a module that is imported at the first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


class NumpyOfThen(types.ModuleType):
    """numpy with a `where` that takes a single truth value, as it did."""

    def __getattr__(self, attribute: str) -> Any:
        return getattr(np, attribute)

    @staticmethod
    def where(condition: Any, *choices: Any) -> Any:
        return np.where(np.atleast_1d(condition), *choices)


def module(name: str, path: Path | None = None, **attributes: Any) -> None:
    stub = types.ModuleType(name)
    if path is not None:
        stub.__path__ = [str(path)]
    stub.__dict__.update(attributes)
    sys.modules[name] = stub


def their_metrics(repository: Path) -> Callable[[str, str], Any]:
    """A function that gives their class for a framework and a name."""
    package = repository / "neural_compressor" / "experimental" / "metric"
    if not package.is_dir():
        sys.exit(f"there is no {package}; --repository must be a checkout of release 1.14")
    silent = types.SimpleNamespace(info=print, warning=print)
    module("neural_compressor", Path())
    module("neural_compressor.utils", Path(), logger=silent)
    module("neural_compressor.utils.utility", LazyImport=Lazy, singleton=lambda cls: cls)
    module("neural_compressor.experimental", Path())
    module("neural_compressor.experimental.metric", package)
    np.float = float  # type: ignore[attr-defined]
    importlib.import_module("pycocotools.cocoeval").np = NumpyOfThen("numpy")
    metric = importlib.import_module("neural_compressor.experimental.metric.metric")
    unused = importlib.util.find_spec("pandas") is None
    if unused:
        module("pandas")
    importlib.import_module("neural_compressor.experimental.metric.bleu")
    if unused:
        del sys.modules["pandas"]
    metric.transformers = glue_of_then(repository)
    return lambda framework, name: metric.registry_metrics[framework][name]


def glue_of_then(repository: Path) -> types.SimpleNamespace:
    """What transformers 4 had for GLUE, as the repository's examples have it."""
    data = repository / "examples/pytorch/nlp/huggingface_models/common/src/transformers/data"
    tree = ast.parse((data / "processors" / "glue.py").read_text())
    modes = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "glue_output_modes"
    )
    module("transformers_of_then", data.parent)
    module(
        "transformers_of_then.file_utils",
        is_sklearn_available=lambda: True,
        requires_sklearn=lambda function: None,
    )
    module("transformers_of_then.data", data)
    metrics = importlib.import_module("transformers_of_then.data.metrics")
    return types.SimpleNamespace(
        glue_output_modes=modes, glue_compute_metrics=metrics.glue_compute_metrics
    )


def batches(draw: Draw, make: Callable[[int], tuple[Any, Any]]) -> Batches:
    return [make(int(size)) for size in draw.integers(2, 12, size=4)]


def scores(*shape: int) -> Callable[[Draw], Batches]:
    """Scores `[N, …]` of classes and labels without the axis of classes."""

    def make(draw: Draw) -> Batches:
        labels = (shape[1:], shape[0])
        return batches(
            draw,
            lambda n: (
                draw.normal(size=(n, *shape)),
                draw.integers(labels[1], size=(n, *labels[0])),
            ),
        )

    return make


def one_hot(draw: Draw) -> Batches:
    return batches(draw, lambda n: (draw.normal(size=(n, 6)), np.eye(6)[draw.integers(6, size=n)]))


def ties(draw: Draw) -> Batches:
    """Scores of few values, of which many are equal."""
    return batches(
        draw, lambda n: (draw.integers(3, size=(n, 6)).astype(float), draw.integers(6, size=n))
    )


def same(*shape: int, high: int = 2) -> Callable[[Draw], Batches]:
    def make(draw: Draw) -> Batches:
        return batches(
            draw,
            lambda n: (
                draw.integers(high, size=(n, *shape)),
                draw.integers(high, size=(n, *shape)),
            ),
        )

    return make


def numbers(*shape: int, listed: bool = False) -> Callable[[Draw], Batches]:
    def make(draw: Draw) -> Batches:
        def one(n: int) -> tuple[Any, Any]:
            pair = draw.normal(size=(2, n, *shape)).astype(np.float32)
            return ([pair[0]], [pair[1]]) if listed else (pair[0], pair[1])

        return batches(draw, one)

    return make


def glue(task: str) -> Callable[[Draw], Batches]:
    def make(draw: Draw) -> Batches:
        if task == "sts-b":
            return batches(draw, lambda n: ([draw.normal(size=(n, 1))], [draw.normal(size=n)]))
        return batches(draw, lambda n: ([draw.normal(size=(n, 2))], [draw.integers(2, size=n)]))

    return make


def chances(draw: Draw) -> Batches:
    return batches(
        draw, lambda n: (draw.random(size=(n + 8, 1)), draw.integers(2, size=(n + 8, 1)))
    )


def tokens(draw: Draw) -> Batches:
    return batches(
        draw, lambda n: (draw.integers(5, size=n).tolist(), draw.integers(5, size=n + 2).tolist())
    )


def sentence(draw: Draw) -> str:
    return " ".join(draw.choice(WORDS, size=int(draw.integers(1, 9))))


def sentences(draw: Draw) -> Batches:
    def one(n: int) -> tuple[Any, Any]:
        right = [sentence(draw) for _ in range(n)]
        return [sentence(draw) if draw.random() < 0.5 else line for line in right], right

    return batches(draw, one)


def answers(draw: Draw) -> Batches:
    def one(n: int) -> tuple[Any, Any]:
        rights = [[{"text": sentence(draw)} for _ in range(3)] for _ in range(n)]
        questions = [{"id": str(i), "answers": right} for i, right in enumerate(rights)]
        predictions = {str(i): sentence(draw) for i in range(n) if draw.random() < 0.8}
        return predictions, [{"paragraphs": [{"qas": questions}]}]

    return [(None, None), *(pair for pair in batches(draw, one) if pair[0])]


def pixels(draw: Draw) -> Batches:
    def one(n: int) -> tuple[Any, Any]:
        labels = draw.integers(21, size=(n, 5, 5))
        right = draw.random(labels.shape) < 0.5
        predicted = np.where(right, labels, draw.integers(21, size=labels.shape))
        return predicted, np.where(draw.random(labels.shape) < 0.1, 255, labels)

    return batches(draw, one)


def boxes(order: str, unit: float = 1.0, named: bool = False) -> Callable[[Draw], Batches]:
    """Boxes near the right ones, outputs in this order: n(umber), b(oxes), s(cores), c(lasses)."""

    def corners(draw: Draw, size: tuple[int, ...]) -> np.ndarray:
        corner, opposite = draw.random((*size, 2)), draw.random((*size, 2))
        return (
            np.concatenate([np.minimum(corner, opposite), np.maximum(corner, opposite)], axis=-1)
            * unit
        )

    def make(draw: Draw) -> Batches:
        kinds = draw.choice(list(CATEGORIES), size=4)
        data = []
        for batch in range(4):
            n, targets, detections = 3, int(draw.integers(1, 6)), 12
            truth, classes = corners(draw, (n, targets)), draw.choice(kinds, size=(n, targets))
            picked = draw.integers(targets, size=(n, detections))
            guesses = np.take_along_axis(truth, picked[..., None], axis=1)
            guesses = guesses + draw.normal(size=guesses.shape) * 0.03 * unit
            outputs = {
                "n": draw.integers(detections + 1, size=n),
                "b": guesses.astype(np.float32),
                "s": np.round(draw.random((n, detections)), 2).astype(np.float32),
                "c": np.take_along_axis(classes, picked, axis=1).astype(np.float32),
            }
            names = np.array([[CATEGORIES[k].encode() for k in row] for row in classes.tolist()])
            empty = np.zeros((n, 0))
            labels = [
                truth.astype(np.float32),
                names if named else empty,
                empty if named else classes,
                np.array([f"{batch}_{i}.jpg".encode() for i in range(n)]),
            ]
            data.append(([outputs[key] for key in order], labels))
        return data

    return make


def cases() -> Iterator[Case]:
    onnx, tensorflow, pytorch = "onnxrt_qlinearops", "tensorflow", "pytorch"
    for framework in (tensorflow, pytorch, onnx):
        for k in (1, 3):
            yield "topk", framework, {"k": k}, scores(6), ""
            yield "topk", framework, {"k": k}, one_hot, ""
            order = "" if framework == tensorflow else "numpy leaves open how theirs orders equals"
            yield "topk", framework, {"k": k}, ties, order
    yield "Accuracy", pytorch, {}, scores(6), ""
    yield "Accuracy", tensorflow, {}, same(high=3), ""
    yield "Accuracy", onnx, {}, scores(4, 3, 3), ""
    for framework in (tensorflow, pytorch, onnx):
        yield "F1", framework, {}, tokens, ""
    yield "Loss", tensorflow, {}, numbers(1), ""
    yield "Loss", tensorflow, {}, numbers(4), ""
    yield "Loss", onnx, {}, numbers(4, listed=True), ""
    for name in ("MAE", "MSE", "RMSE"):
        yield name, tensorflow, {}, numbers(), ""
        yield name, onnx, {"compare_label": False}, numbers(3, 2, listed=True), ""
    for task in ("dlrm", "dien", "wide_deep"):
        yield "ROC", pytorch, {"task": task}, chances, ""
    for task in ("mrpc", "qqp", "qnli", "rte", "sts-b", "cola", "mnli", "wnli", "sst-2"):
        yield "GLUE", onnx, {"task": task}, glue(task), ""
    yield "SquadF1", tensorflow, {}, answers, ""
    yield "BLEU", tensorflow, {}, sentences, ""
    yield "mIOU", tensorflow, {"num_classes": 21}, pixels, ""
    yield from box_cases()


def box_cases() -> Iterator[Case]:
    onnx, tensorflow, key = "onnxrt_qlinearops", "tensorflow", "DetectionBoxes_"
    for points in (0, 11, 101):
        for overlap in (0.5, 0.75, "0.5:0.05:0.95"):
            options = {"iou_thrs": overlap, "map_points": points}
            yield "mAP", tensorflow, options, boxes("nbsc"), ""
    yield "COCOmAP", tensorflow, {}, boxes("bsc", named=True), ""
    yield "COCOmAP", onnx, {"map_key": key + "Precision/mAP@.50IOU"}, boxes("nbsc"), ""
    yield "COCOmAP", onnx, {"map_key": key + "Precision/mAP (medium)"}, boxes("bsc", 200), ""
    yield "COCOmAP", onnx, {"map_key": key + "Recall/AR@10"}, boxes("bsc"), ""
    yield "VOCmAP", tensorflow, {}, boxes("bsc"), ""
    yield "COCOmAPv2", onnx, {}, boxes("bsc"), ""
    mapping = {"num_detections": 0, "boxes": 1, "scores": 2, "classes": 3}
    yield "COCOmAPv2", onnx, {"output_index_mapping": mapping}, boxes("nbsc", named=True), ""
    mapping = {"boxes": 0, "scores": 2, "classes": 1}
    options = {"output_index_mapping": mapping, "iou_thrs": 0.5, "map_points": 11}
    yield "COCOmAPv2", onnx, options, boxes("bcs"), ""
    recall = {"map_points": 0, "map_key": key + "Recall/AR@100"}
    yield "mAP", tensorflow, recall, boxes("bsc"), "theirs is 1 whatever was found"
    yield "Accuracy", "pytorch", {}, columns, "theirs compares each with every label"
    yield "MAE", tensorflow, {}, unsigned, "theirs lets unsigned numbers wrap around"


def columns(draw: Draw) -> Batches:
    return batches(draw, lambda n: (draw.integers(2, size=(n, 1)), draw.integers(2, size=n)))


def unsigned(draw: Draw) -> Batches:
    return batches(draw, lambda n: tuple(draw.integers(256, size=(2, n, 3)).astype(np.uint8)))  # type: ignore[return-value]


def compared(case: Case, theirs: Callable[[str, str], Any], rounds: int) -> float:
    """The largest difference, as a share of the value where that is above 1."""
    name, framework, options, make, _ = case
    ours = build_metric(name, options, load_vocabulary(framework.split("_")[0]).metrics)
    reference = theirs(framework, name)(**options)
    largest = 0.0
    for seed in range(rounds):
        ours.reset()
        reference.reset()
        for predictions, labels in make(np.random.default_rng(seed)):
            ours.update(predictions, labels)
            reference.update(predictions, labels)
        value, expected = ours.result(), float(reference.result())
        largest = max(largest, abs(value - expected) / max(1.0, abs(expected)))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20, help="random data sets of each row")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.simplefilter("ignore")
    table = Table("metric", "framework", "options", "given", "largest difference", "verdict")
    failed = 0
    quiet = io.StringIO()  # theirs print
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        theirs = their_metrics(arguments.repository)
        for case in cases():
            name, framework, options, make, why = case
            inputs = make.__qualname__.partition(".")[0]
            difference = compared(case, theirs, arguments.rounds)
            equal = difference <= TOLERANCE
            failed += not (equal or why)
            verdict = "equal" if equal else f"on purpose: {why}" if why else "DIFFERS"
            setting = ", ".join(f"{key}={value}" for key, value in options.items())
            table.add_row(name, framework, setting, inputs, f"{difference:.1e}", verdict)
    Console(width=160).print(table)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
