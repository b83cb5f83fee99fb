"""Bytes, perplexity and rank correlation of uniform weights and of tuned plans.

Plans that are accepted on a tuning text are also judged on text that their run does not see.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from scipy.stats import spearmanr
from torch import nn

from benchmarks.decoders.goals import Detail, Figure, Goal
from benchmarks.decoders.settings import Batches, Subject, change, perplexity
from neural_mp import MixedPrecision, convert_with_plan
from neural_mp.adaptors.common.sensitivity import (
    list_float_input_specs,
    measure_weight_noise,
)
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.enums import Capture, WeightCorrection
from neural_mp.core.hardware import detect
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.metrics import KLDivergence

_CHANGES = ("perplexity", "unseen text")
HEADINGS = ("seed", "model", "weights", "bytes", "over 8 bits", *_CHANGES, "trials")
AWQ, GPTQ = WeightCorrection.AWQ, WeightCorrection.GPTQ
_LEARNED = WeightCorrection.AUTOROUND
Corrections = tuple[WeightCorrection, ...]
#: Bits → corrections of uniform weights; learned ones are a section of their own.
UNIFORM: dict[int, tuple[Corrections, ...]] = {
    8: ((),),
    4: ((), (WeightCorrection.HQQ,), (AWQ,), (GPTQ,), (AWQ, GPTQ)),
    3: ((AWQ, GPTQ),),
    2: ((AWQ, GPTQ),),
}
LEARNED = {bits: ((_LEARNED,), (AWQ, GPTQ, _LEARNED)) for bits in (4, 3, 2)}
_FEW_LEVELS, _ALL_LEVELS = "1 %, 4 and 8 bits", "1 %, 2, 4 and 8 bits"
_RUNS: dict[str, dict[str, Any]] = {
    _FEW_LEVELS: {"precisions": "int4,int8"},
    _ALL_LEVELS: {"precisions": "int2,int4,int8"},
    "1 %, 2, 3, 4 and 8 bits": {"precisions": "int2,int3,int4,int8"},
    "3.4 bits": {"precisions": "int2,int3,int4,int8", "max_bits": 3.4},
}
#: Samples on which divergences of single layers are measured.
_DIVERGENCE_BATCHES = 4
UNSEEN_HEADINGS = ("seed", "model", "tuning text", "bytes", "tuning", "unseen", "verdict")
TOLERANCE = 0.01
MISSED, HELD, REFUSED = "missed", "held", "not accepted"


def tuned(
    net: nn.Module, calibration: Batches, batches: Batches, workspace: str, **options: Any
) -> Any:
    """Return the smallest result within the tolerance of 1 %."""
    converter = MixedPrecision(workspace=workspace, **options)
    converter.model, converter.capture, converter.objective = net, "layers", "modelsize"
    converter.metric, converter.eval_dataloader = "perplexity", batches
    converter.calib_dataloader = calibration
    return converter()


@dataclass(frozen=True)
class Measured:
    """One decoder of a subject, with figures of FP32."""

    subject: Subject
    name: str

    @cached_property
    def net(self) -> nn.Module:
        """The decoder."""
        return self.subject.nets[self.name]

    @cached_property
    def before(self) -> tuple[float, float]:
        """The perplexities of FP32 on tuning and unseen text."""
        return tuple(perplexity(self.net, part) for part in self._texts)  # type: ignore[return-value]

    @property
    def _texts(self) -> tuple[Batches, Batches]:
        return self.subject.tuning, self.subject.unseen

    @cached_property
    def _model(self) -> Any:
        return PyTorchAdaptor().load(
            self.net, example=self.subject.tuning[0][0], capture=Capture.LAYERS
        )

    @cached_property
    def _space(self) -> Any:
        return PyTorchAdaptor().space(self._model, detect())

    @cached_property
    def _ops(self) -> list[str]:
        return [op for op in self._space.tunable_ops if list_float_input_specs(self._space, op)]

    @cached_property
    def bytes_of_fp32(self) -> int:
        """Bytes of all weights of the float decoder."""
        return PyTorchAdaptor().weight_bytes(self._model)

    @cached_property
    def bytes_of_8_bits(self) -> int:
        """Bytes of all weights in 8 bits."""
        return _bytes(self._converted(self._uniform(8, ())))

    def rank(self) -> float:
        """Return the correlation of scores with divergences of layers alone."""
        adaptor, model, space = PyTorchAdaptor(), self._model, self._space
        inputs = [batch for batch, _ in self.subject.calibration]
        weights = CorrectedWeights(adaptor, model, lambda: inputs)
        scores = measure_weight_noise(adaptor, model, inputs, space, weights)
        few = self.subject.tuning[:_DIVERGENCE_BATCHES]
        truth = [adaptor.predict(model, batch) for batch, _ in few]
        pairs = []
        for op, noise in scores.items():
            for spec in _largest(list_float_input_specs(space, op)).values():
                plan = space.resolve(PrecisionPlan({op: make_weight_only(spec)}))
                converted = adaptor.convert(model, plan, Observations(), space, weights)
                metric = KLDivergence()
                for (batch, _), logits in zip(few, truth, strict=True):
                    metric.update(adaptor.predict(converted, batch), logits)
                pairs.append((noise[str(spec)], metric.result()))
        return float(spearmanr(*zip(*pairs, strict=True)).statistic)

    def uniform(self, levels: Mapping[int, Sequence[Corrections]]) -> Iterator[Detail | Figure]:
        """Yield rows of uniform weights."""
        for bits, variants in levels.items():
            for corrections in variants:
                label = " ".join(corrections) or "rtn"
                result = self._converted(self._uniform(bits, corrections))
                row = self._row(f"{bits} bits, {label}", result, "")
                yield row
                if self._is_hostile and bits == 4 and corrections == (AWQ, GPTQ):
                    yield Figure(Goal.UNIFORM, row.cells[-2])

    def runs(self) -> Iterator[Detail | Figure]:
        """Yield rows of tuned plans."""
        with tempfile.TemporaryDirectory() as folder:
            for label, options in _RUNS.items():
                result = tuned(
                    self.net, self.subject.calibration, self.subject.tuning, folder, **options
                )
                counts = ", ".join(f"{count} {p}" for p, count in result.plan.counts().items())
                trials = len(result.trials)
                yield self._row(f"{label}: {counts}", result, str(trials))
                size = f"{_bytes(result) / self.bytes_of_8_bits:.3f}"
                if self._is_hostile and label == _FEW_LEVELS:
                    yield Figure(Goal.FEW_LEVELS, size)
                if self._is_hostile and label == _ALL_LEVELS:
                    yield Figure(Goal.ALL_LEVELS, size)
                    yield Figure(Goal.EVALUATIONS, str(trials))

    @property
    def _is_hostile(self) -> bool:
        return self.net is self.subject.hostile

    def _row(self, label: str, result: Any, trials: str) -> Detail:
        changes = (
            change(perplexity(result, batches), base)
            for batches, base in zip(self._texts, self.before, strict=True)
        )
        part = _bytes(result) / self.bytes_of_fp32, _bytes(result) / self.bytes_of_8_bits
        sizes = (f"{value:.3f}" for value in part)
        seed = str(self.subject.seed)
        return Detail(HEADINGS, (seed, self.name, label, *sizes, *changes, trials))

    def _uniform(self, bits: int, corrections: Corrections) -> PrecisionPlan:
        configs = {}
        for op in self._ops:
            spec = _largest(list_float_input_specs(self._space, op))[bits]
            # Tables have no corrections.
            configs[op] = make_weight_only(
                replace(spec, corrections=corrections if spec.corrections else ())
            )
        return PrecisionPlan(configs)

    def _converted(self, plan: PrecisionPlan) -> Any:
        return convert_with_plan(
            self.net,
            plan,
            inputs=self.subject.tuning[0][0],
            capture=Capture.LAYERS,
            calibration=[inputs for inputs, _ in self.subject.calibration],
            rounding_steps=self.subject.settings.rounding_steps,
        )


def _largest(specs: Sequence[QuantSpec]) -> dict[int, QuantSpec]:
    """Bits → the quantization of a weight in the largest groups."""
    largest: dict[int, QuantSpec] = {}
    for spec in specs:
        largest.setdefault(spec.dtype.bits, spec)
    return largest


def _bytes(result: Any) -> int:
    return int(result.adaptor.weight_bytes(result.held))


def weights_of(subject: Subject) -> Iterator[Detail | Figure]:
    """Yield figures of both decoders of a subject."""
    for name in subject.nets:
        measured = Measured(subject, name)
        yield Figure(Goal.RANK, f"{measured.rank():.3f}")
        yield from measured.runs()
        yield from measured.uniform(UNIFORM)


def learned_of(subject: Subject) -> Iterator[Detail | Figure]:
    """Yield rows of learned rounding for the twin with outlier channels."""
    yield from Measured(subject, "outlier channels").uniform(LEARNED)


def unseen_of(subject: Subject) -> Iterator[Detail]:
    """Yield a row per run: several texts per decoder, tolerance 1 %, 2 to 8 bits."""
    count = subject.settings.tuning_texts
    for name, net in subject.nets.items():
        base = perplexity(net, subject.unseen)
        with tempfile.TemporaryDirectory() as folder:
            for index in range(count):
                text = subject.tuning_part(index, count)
                result = tuned(
                    net, subject.calibration, text, folder, precisions="int2,int3,int4,int8"
                )
                original, converted = (perplexity(model, text) for model in (net, result))
                unseen = perplexity(result, subject.unseen)
                verdict = HELD if unseen <= base * (1 + TOLERANCE) else MISSED
                size = result.adaptor.weight_bytes(result.held)
                whole = sum(4 * p.numel() for p in net.parameters())
                yield Detail(
                    UNSEEN_HEADINGS,
                    (
                        str(subject.seed),
                        name,
                        f"part {index + 1}",
                        f"{size / whole:.3f}",
                        change(converted, original),
                        change(unseen, base),
                        verdict if result.met else REFUSED,
                    ),
                )
