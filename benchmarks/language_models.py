"""Bits per weight of a small decoder and of its twin with outlier channels, at +1 % perplexity.

    OMP_NUM_THREADS=1 python benchmarks/language_models.py [--steps N] [--windows N] [--keep DIR]

Rows are uniform weights of 8, 4, 3 and 2 bits, rounded to nearest and corrected, in the largest
groups of each layer; the plans of runs with the tolerance of 1 %; and the most accurate plan of 3.4
bits per weight. Bytes are those of all weights, as a fraction of FP32; "unseen text" is the
perplexity on as many windows that the run did not see. `rank` is Spearman's correlation of the
Fisher probe's scores with divergences from FP32 that are measured for every layer alone, in the
largest groups of each number of bits. `--keep` trains once and keeps the decoder in a folder.
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
from dataclasses import replace
from typing import Any

import source_decoder as decoder
from scipy.stats import spearmanr
from tables import markdown_table
from torch import nn
from transformers import LlamaForCausalLM

from neural_mp import MixedPrecision, convert_with_plan
from neural_mp.adaptors.common.corrected_weights import CorrectedWeights
from neural_mp.adaptors.common.fisher import specs_of, weight_noise
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.enums import Capture, WeightCorrection
from neural_mp.core.hardware import detect
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.metrics import KLDivergence, Perplexity

HEADINGS = ("model", "weights", "bytes", "perplexity", "unseen text", "trials", "rank")
_CORRECTIONS: dict[str, tuple[WeightCorrection, ...]] = {
    "rtn": (),
    "hqq": (WeightCorrection.HQQ,),
    "awq": (WeightCorrection.AWQ,),
    "gptq": (WeightCorrection.GPTQ,),
    "awq gptq": (WeightCorrection.AWQ, WeightCorrection.GPTQ),
    "autoround": (WeightCorrection.AUTOROUND,),
    "awq gptq autoround": (
        WeightCorrection.AWQ,
        WeightCorrection.GPTQ,
        WeightCorrection.AUTOROUND,
    ),
}
#: Those of 3 and 2 bits.
_OF_FEWER_BITS = ("awq gptq", "autoround", "awq gptq autoround")
#: Samples on which divergences of single layers are measured.
_DIVERGENCE_BATCHES = 4


def perplexity(model: Any, batches: Sequence[Any]) -> float:
    metric = Perplexity()
    for inputs, labels in batches:
        metric.update(model(**inputs), labels)
    return metric.result()


def converted(
    net: nn.Module, plan: PrecisionPlan, batches: Sequence[Any], calibration: Sequence[Any]
) -> Any:
    return convert_with_plan(
        net,
        plan,
        inputs=batches[0][0],
        capture=Capture.LAYERS,
        calibration=[inputs for inputs, _ in calibration],
    )


def largest(specs: Sequence[QuantSpec]) -> dict[int, QuantSpec]:
    """Bits → the quantization of a weight in the largest groups."""
    found: dict[int, QuantSpec] = {}
    for spec in specs:
        found.setdefault(spec.dtype.bits, spec)
    return found


def rank(
    adaptor: Any, model: Any, space: Any, scores: Any, made: Any, batches: Sequence[Any]
) -> float:
    """Correlation of scores with divergences of layers alone."""
    few = batches[:_DIVERGENCE_BATCHES]
    truth = [adaptor.predict(model, inputs) for inputs, _ in few]
    pairs = []
    for op, found in scores.items():
        for spec in largest(specs_of(space, op)).values():
            plan = space.resolve(PrecisionPlan({op: weight_only(spec)}))
            alone = adaptor.convert(model, plan, Observations(), space, made)
            metric = KLDivergence()
            for (inputs, _), logits in zip(few, truth, strict=True):
                metric.update(adaptor.predict(alone, inputs), logits)
            pairs.append((found[str(spec)], metric.result()))
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def tuned(
    net: nn.Module, calibration: Sequence[Any], batches: Sequence[Any], **options: Any
) -> Any:
    converter = MixedPrecision(cache=False, **options)
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
    made = CorrectedWeights(adaptor, model, lambda: (inputs for inputs, _ in calibration))
    scores = weight_noise(adaptor, model, (inputs for inputs, _ in calibration), space, made)
    found = f"{rank(adaptor, model, space, scores, made, tuning):.3f}"

    def row(words: str, result: Any, evaluations: str, rank: str = "") -> tuple[str, ...]:
        changes = (
            f"{(perplexity(result, batches) / base - 1) * 100:+.2f} %"
            for batches, base in zip((tuning, unseen), before, strict=True)
        )
        size = result.adaptor.weight_bytes(result.held) / fp32
        return name, words, f"{size:.3f}", *changes, evaluations, rank

    def uniform(bits: int, corrections: tuple[WeightCorrection, ...]) -> PrecisionPlan:
        configs = {}
        for op in scores:
            spec = largest(specs_of(space, op))[bits]
            # Tables have no corrections.
            wanted = corrections if spec.corrections else ()
            configs[op] = weight_only(replace(spec, corrections=wanted))
        return PrecisionPlan(configs)

    rows = [row("8 bits", converted(net, uniform(8, ()), tuning, calibration), "")]
    for words, corrections in _CORRECTIONS.items():
        rows.append(
            row(
                f"4 bits, {words}", converted(net, uniform(4, corrections), tuning, calibration), ""
            )
        )
    for bits in (3, 2):
        for words in _OF_FEWER_BITS:
            plan = uniform(bits, _CORRECTIONS[words])
            rows.append(row(f"{bits} bits, {words}", converted(net, plan, tuning, calibration), ""))
    runs: dict[str, dict[str, Any]] = {
        "1 %, 4 and 8 bits": {"precisions": "int4,int8"},
        "1 %, 2, 4 and 8 bits": {"precisions": "int2,int4,int8"},
        "1 %, 2, 3, 4 and 8 bits": {"precisions": "int2,int3,int4,int8"},
        "3.4 bits": {"precisions": "int2,int3,int4,int8", "max_bits": 3.4},
    }
    for words, options in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            result = tuned(net, calibration, tuning, workspace=folder, **options)
        counts = ", ".join(f"{count} {p}" for p, count in result.plan.counts().items())
        rows.append(row(f"{words}: {counts}", result, str(len(result.trials)), found))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800, help="steps of training")
    parser.add_argument("--keep", type=Path, help="folder of the trained decoder")
    parser.add_argument("--windows", type=int, default=256, help="windows of each text")
    options = parser.parse_args()
    train, tune, unseen = decoder.texts()
    started = time.process_time()
    if options.keep is not None and options.keep.is_dir():
        net = LlamaForCausalLM.from_pretrained(options.keep).eval()
    else:
        net = decoder.trained(train, options.steps)
        if options.keep is not None:
            net.save_pretrained(options.keep)
    data = [decoder.windows(ids, options.windows) for ids in (train, tune, unseen)]
    print(f"trained in {time.process_time() - started:.0f} CPU s, perplexity per byte "
          f"{perplexity(net, data[1]):.3f}")  # fmt: skip
    rows = rows_of("plain", net, data)
    rows += rows_of("outlier channels", decoder.hostile(net), data)
    print(markdown_table(HEADINGS, rows))


if __name__ == "__main__":
    main()
