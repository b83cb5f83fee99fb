"""Bits per weight of a small decoder and of its twin with outlier channels, at +1 % perplexity.

    OMP_NUM_THREADS=1 python benchmarks/language_models.py [--steps 800] [--windows 256]

Rows are uniform weights of 8 and 4 bits, and the plan of a run with the tolerance of 1 %. Bytes are
those of all weights, as a fraction of FP32; "unseen text" is the perplexity on as many windows that
the run did not see. `rank` is Spearman's correlation of the Fisher probe's scores with divergences
from FP32 that are measured for every layer and form alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Files beside this one bear the names of packages: its folder must not be searched for those.
# ruff: noqa: E402
sys.path[0] = str(Path(__file__).resolve().parent / "models")

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import source_decoder as decoder
from scipy.stats import spearmanr
from tables import markdown_table
from torch import nn

from neural_mp import MixedPrecision, convert_with_plan
from neural_mp.adaptors.common.fisher import specs_of, weight_noise
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.enums import Capture
from neural_mp.core.hardware import detect
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.metrics import KLDivergence, Perplexity

HEADINGS = ("model", "weights", "bytes", "perplexity", "unseen text", "evaluations", "rank")
#: Samples on which divergences of single layers are measured.
_DIVERGENCE_BATCHES = 4


def perplexity(model: Any, batches: Sequence[Any]) -> float:
    metric = Perplexity()
    for inputs, labels in batches:
        metric.update(model(**inputs), labels)
    return metric.result()


def converted(net: nn.Module, plan: PrecisionPlan, batches: Sequence[Any]) -> Any:
    return convert_with_plan(net, plan, inputs=batches[0][0], capture=Capture.LAYERS)


def rank(adaptor: Any, model: Any, space: Any, scores: Any, batches: Sequence[Any]) -> float:
    """Correlation of scores with divergences of layers alone."""
    few = batches[:_DIVERGENCE_BATCHES]
    truth = [adaptor.predict(model, inputs) for inputs, _ in few]
    pairs = []
    for op, found in scores.items():
        for spec in specs_of(space, op):
            precision = Precision.INT4 if spec.dtype.bits == 4 else Precision.INT8
            plan = space.resolve(PrecisionPlan({op: OpConfig(precision, spec)}))
            alone = adaptor.convert(model, plan, Observations(), space)
            metric = KLDivergence()
            for (inputs, _), logits in zip(few, truth, strict=True):
                metric.update(adaptor.predict(alone, inputs), logits)
            pairs.append((found[str(spec)], metric.result()))
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def tuned(net: nn.Module, calibration: Sequence[Any], batches: Sequence[Any], folder: str) -> Any:
    converter = MixedPrecision(precisions="int4,int8", workspace=folder, cache=False)
    converter.model, converter.capture, converter.objective = net, "layers", "modelsize"
    converter.metric, converter.eval_dataloader = "perplexity", batches
    converter.calib_dataloader = calibration
    return converter()


def rows_of(name: str, net: nn.Module, data: Sequence[Sequence[Any]]) -> list[tuple[str, ...]]:
    calibration, tuning, unseen = data
    before = perplexity(net, tuning), perplexity(net, unseen)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=tuning[0][0], capture=Capture.LAYERS)
    space = adaptor.space(model, detect())
    fp32 = adaptor.weight_bytes(model)
    scores = weight_noise(adaptor, model, (inputs for inputs, _ in calibration), space)
    found = f"{rank(adaptor, model, space, scores, tuning):.3f}"

    def row(words: str, result: Any, evaluations: str, rank: str = "") -> tuple[str, ...]:
        changes = (
            f"{(perplexity(result, batches) / base - 1) * 100:+.2f} %"
            for batches, base in zip((tuning, unseen), before, strict=True)
        )
        size = result.adaptor.weight_bytes(result.held) / fp32
        return name, words, f"{size:.3f}", *changes, evaluations, rank

    uniform = {
        "8 bits": {op: specs_of(space, op)[0] for op in scores},
        "4 bits, groups of 32": {op: specs_of(space, op)[-1] for op in scores},
        "4 bits, largest groups": {op: specs_of(space, op)[1] for op in scores},
    }
    rows = []
    for words, specs in uniform.items():
        bits = {
            op: Precision.INT4 if s.dtype.bits == 4 else Precision.INT8 for op, s in specs.items()
        }
        plan = PrecisionPlan({op: OpConfig(bits[op], spec) for op, spec in specs.items()})
        rows.append(row(words, converted(net, plan, tuning), "0"))
    with tempfile.TemporaryDirectory() as folder:
        result = tuned(net, calibration, tuning, folder)
    counts = ", ".join(f"{count} {p}" for p, count in result.plan.counts().items())
    rows.append(row(f"ours: {counts}", result, str(result.report.evaluations), found))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800, help="steps of training")
    parser.add_argument("--windows", type=int, default=256, help="windows of each text")
    options = parser.parse_args()
    train, tune, unseen = decoder.texts()
    started = time.process_time()
    net = decoder.trained(train, options.steps)
    data = [decoder.windows(ids, options.windows) for ids in (train, tune, unseen)]
    print(f"trained in {time.process_time() - started:.0f} CPU s, perplexity per byte "
          f"{perplexity(net, data[1]):.3f}")  # fmt: skip
    rows = rows_of("plain", net, data)
    rows += rows_of("outlier channels", decoder.hostile(net), data)
    print(markdown_table(HEADINGS, rows))


if __name__ == "__main__":
    main()
