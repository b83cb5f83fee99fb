"""Recurrent layers and bodies of control flow: how much faster INT8 is than FP32, and how near.

    python -m benchmarks.recurrent [--frameworks onnxrt,…] [--layers lstm,gru,…] [--rounds 60]

Hidden size 256, 32 steps, batches of 1 and 16, all that can run in INT8 in INT8, no accuracy asked
for. FP32 and INT8 run in turn in one process, each in what its user would run it in; the ratio is
that of the medians of CPU seconds, with the least and the most of five groups of rounds. In
OpenVINO, BF16 is measured as well. The error is the largest difference over the largest value. A
framework adds its cases to `FRAMEWORKS`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console

from benchmarks.measurement.tables import make_table

HIDDEN, STEPS, BATCHES, GROUPS = 256, 32, (1, 16), 5
Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """A model at one batch size, before and after.

    Attributes:
        layer: what it is.
        batch: how many sequences.
        before: runs FP32.
        after: runs what was made of it.
        plan: how many ops run in what.
    """

    layer: str
    batch: int
    before: Callable[[], Any]
    after: Callable[[], Any]
    plan: str


def drawn(*shape: int, seed: int = 0) -> Array:
    """Numbers to fill weights and inputs with."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def converted(model: Any, batches: list[Any], **settings: Any) -> Any:
    """A model in INT8, all that can."""
    from neural_mp import MixedPrecision

    with tempfile.TemporaryDirectory() as folder:
        converter = MixedPrecision()
        converter.model, converter.precisions = model, "int8"
        converter.calib_dataloader, converter.workspace = batches, folder
        converter.exit_policy = {"performance_only": True}
        for name, value in settings.items():
            setattr(converter, name, value)
        return converter()


def in_words(result: Any) -> str:
    """Return the number of ops of a plan in each precision."""
    return ", ".join(f"{count} {p.value}" for p, count in result.plan.counts().items())


def onnxrt_cases(selected: Callable[[str], bool]) -> Iterator[Case]:
    """Layers as ONNX has them; cells and whole nets in bodies of Scan and If."""
    import onnxruntime as ort

    from benchmarks.nets import recurrent_onnx

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    for layer, make in recurrent_onnx.MODELS.items():
        if not selected(layer):
            continue
        for batch in BATCHES:
            model, feeds = make(batch)
            result = converted(model, [feeds])
            sessions = [
                ort.InferenceSession(m.SerializeToString(), options) for m in (model, result.model)
            ]
            fp32, quantized = (
                lambda session=session, feeds=feeds: session.run(None, feeds)
                for session in sessions
            )
            yield Case(layer, batch, fp32, quantized, in_words(result))


def openvino_cases(selected: Callable[[str], bool]) -> Iterator[Case]:
    """Layers of ONNX as OpenVINO reads them, in INT8 and in BF16."""
    import onnx

    from benchmarks.nets import recurrent_onnx
    from neural_mp.adaptors.openvino.runtime import ov

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    for layer, make in recurrent_onnx.LAYERS.items():
        for batch in BATCHES if selected(layer) else ():
            model, feeds = make(batch)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "layer.onnx"
                onnx.save(model, path)
                source = ov.convert_model(path).clone()
            request = ov.Core().compile_model(source, "CPU", settings).create_infer_request()
            for precision in ("int8", "bf16"):
                result = converted(source, [feeds], precisions=precision)
                yield Case(
                    f"{layer}, {precision}",
                    batch,
                    lambda request=request, feeds=feeds: request.infer(feeds)[0],
                    partial(result, feeds),
                    in_words(result),
                )


def tensorflow_cases(selected: Callable[[str], bool]) -> Iterator[Case]:
    """Layers of Keras beside the graph as TensorFlow freezes it, and as it is prepared in FP32."""
    from benchmarks.nets import recurrent_keras

    for layer, make in recurrent_keras.MODELS.items():
        if not selected(layer):
            continue
        model, inputs = make(), drawn(max(BATCHES), STEPS, recurrent_keras.WIDTH)
        result = converted(model, [(inputs, None)], objective="modelsize")
        baselines = {
            layer: recurrent_keras.frozen(model),
            f"{layer}, prepared": recurrent_keras.prepared(model),
        }
        for name, baseline in baselines.items():
            for batch in BATCHES:
                feeds = inputs[:batch]
                yield Case(
                    name,
                    batch,
                    lambda baseline=baseline, feeds=feeds: baseline(feeds),
                    lambda result=result, feeds=feeds: result.loaded(feeds),
                    in_words(result),
                )


def pytorch_cases(selected: Callable[[str], bool]) -> Iterator[Case]:
    """Layers as `torch.nn` has them, called by themselves."""
    import torch
    from torch import nn

    class Sequences(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)[0]

    torch.set_num_threads(1)
    for kind in (nn.LSTM, nn.GRU):
        for inputs, bidirectional in ((64, False), (HIDDEN, False), (HIDDEN, True)):
            layer = (
                f"{kind.__name__.lower()}{', both ways' if bidirectional else ''}, {inputs} inputs"
            )
            for batch in BATCHES if selected(layer) else ():
                torch.manual_seed(0)
                net = Sequences(
                    kind(inputs, HIDDEN, batch_first=True, bidirectional=bidirectional)
                ).eval()
                x = torch.from_numpy(drawn(batch, STEPS, inputs))
                result = converted(net, [x], objective="modelsize")

                def before(net: nn.Module = net, x: torch.Tensor = x) -> Any:
                    with torch.inference_mode():
                        return net(x)

                yield Case(layer, batch, before, partial(result, x), in_words(result))


#: Framework → its cases, of the layers that are wanted.
FRAMEWORKS: dict[str, Callable[[Callable[[str], bool]], Iterator[Case]]] = {
    "onnxrt": onnxrt_cases,
    "openvino": openvino_cases,
    "tensorflow": tensorflow_cases,
    "pytorch": pytorch_cases,
}


def seconds_of(run: Callable[[], Any]) -> float:
    """CPU seconds of one run."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


def ratios(case: Case, rounds: int) -> tuple[float, list[float]]:
    """Milliseconds of FP32, and how many times faster the other is, in groups of rounds."""
    for _ in range(3):
        case.before(), case.after()
    pairs = [(seconds_of(case.before), seconds_of(case.after)) for _ in range(rounds)]
    size = max(rounds // GROUPS, 1)
    groups = [pairs[start : start + size] for start in range(0, rounds, size)]
    medians = [tuple(map(statistics.median, zip(*group, strict=True))) for group in groups]
    speedups = [fp32 / quantized for fp32, quantized in medians]
    return statistics.median(fp32 for fp32, _ in pairs) * 1e3, speedups


def error(case: Case) -> float:
    """The largest difference of the first outputs, over the largest value."""
    expected, actual = (_first(run()) for run in (case.before, case.after))
    return float(np.abs(expected - actual).max() / np.abs(expected).max())


def _first(outputs: Any) -> Array:
    while isinstance(outputs, list | tuple):
        outputs = outputs[0]
    return np.asarray(outputs, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--layers", default="", help="parts of the names of layers; all by default")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    parts = [part for part in options.layers.split(",") if part]
    headings = ("framework", "layer", "batch", "FP32, ms", "× of FP32", "error", "plan")
    table = make_table(f"Hidden size {HIDDEN}, {STEPS} steps, one thread", *headings, words=2)
    for framework in options.frameworks.split(","):
        cases = FRAMEWORKS[framework](lambda layer: not parts or any(p in layer for p in parts))
        for case in cases:
            milliseconds, speedups = ratios(case, options.rounds)
            middle, least, most = statistics.median(speedups), min(speedups), max(speedups)
            table.add_row(
                framework,
                case.layer,
                str(case.batch),
                f"{milliseconds:.2f}",
                f"{middle:.2f} ({least:.2f}…{most:.2f})",
                f"{error(case):.1e}",
                case.plan,
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
