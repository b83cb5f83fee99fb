"""Records of runs, made up, for tests of the page: of any size, with any names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quantization_flow import find_quantized_tensors
from neural_mp.core.trial import Outcome, Trial
from neural_mp.runs.report import (
    Conversion,
    Machine,
    ProbeMeasurements,
    Report,
    RunEnd,
    RunRecord,
    RunStart,
    Setting,
    count_ops,
)
from neural_mp.space import Capability

INT8, BF16 = OpConfig(Precision.INT8), OpConfig(Precision.BF16)
_BLOCK = ("norm", "query", "key", "value", "scores", "softmax", "context", "output", "add")


def chain(count: int, named: Callable[[int], str] = "op{}".format) -> OpGraph:
    """Convolutions with a ReLU each, every third joined by an addition to the one before it."""
    ops: list[Op] = []
    for index in range(count):
        previous = ops[-1].name if ops else "x"
        name, kind = named(index), ("conv2d", "relu", "add")[index % 3]
        if kind == "conv2d":
            ops.append(Op(name, kind, (previous,), weights=9216))
        elif kind == "relu":
            ops.append(Op(name, kind, (previous,), fusion_group=previous))
        else:
            ops.append(Op(name, kind, (previous, ops[-3].name if len(ops) > 2 else "x")))
    return OpGraph(ops, ["x"], [ops[-1].name])


def transformer(count: int) -> OpGraph:
    """Blocks of attention, with names as they are in the wild, as many as make `count` ops."""
    ops: list[Op] = []
    previous = "tokens"
    while len(ops) < count:
        stem = f"encoder.layer.{len(ops) // len(_BLOCK)}.attention"
        norm, query, key, value, scores, softmax, context, output, add = (
            f"{stem}.{part}" for part in _BLOCK
        )
        ops += [
            Op(norm, "layer_norm", (previous,), weights=1536),
            *(Op(name, "linear", (norm,), weights=589824) for name in (query, key, value)),
            Op(scores, "matmul", (query, key)),
            Op(softmax, "softmax", (scores,)),
            Op(context, "matmul", (softmax, value)),
            Op(output, "linear", (context,), weights=589824),
            Op(add, "add", (output, previous)),
        ]
        previous = add
    return OpGraph(ops, ["tokens"], [previous])


def setup(graph: OpGraph, model: str = "Net", reason: str = "no integer kernel") -> RunStart:
    """A run of a model whose convolutions and products can run in INT8."""
    decided = [op.name for op in graph if op.type in ("conv2d", "linear")]
    capabilities = {
        op.name: Capability((INT8, BF16, FP32))
        if op.name in decided
        else Capability((BF16, FP32), {Precision.INT8: reason})
        for op in graph
    }
    return RunStart(
        "2026-11-23T12:00:00+00:00",
        model,
        "pytorch",
        graph,
        capabilities,
        tuple(decided),
        find_quantized_tensors(graph, frozenset(decided)),
        {op: 144 for op in decided},
        {"strategy": Setting("mincut"), "precisions": Setting("int8, bf16", "Python")},
        64,
        Machine("A CPU", 2, ("avx2",), {"int8": ("natively", "CPU has avx2")}, "Linux"),
        {"Python": "3.11.7", "torch": "2.13.0"},
    )


def plan_of(graph: OpGraph, every: int = 1) -> PrecisionPlan:
    """Every n-th decided op in INT8, the others in BF16."""
    decided = [op.name for op in graph if op.type in ("conv2d", "linear")]
    return PrecisionPlan({op: INT8 if i % every == 0 else BF16 for i, op in enumerate(decided)})


def trials(graph: OpGraph, count: int = 6) -> tuple[Trial, ...]:
    """Trials of every outcome but failure, and one that failed."""
    result = []
    for number in range(count):
        share = 0.3 + 0.1 * number
        outcome = (Outcome.MET, Outcome.MISSED, Outcome.MET, Outcome.PRUNED, Outcome.SLOW)[
            number % 5
        ]
        figures = {"performance": share * 0.08, "relative_latency": share}
        figures |= {"relative_latency_low": share * 0.9, "relative_latency_high": share * 1.1}
        timed = outcome in (Outcome.MET, Outcome.SLOW)
        accuracy = 0.95 if timed else 0.9
        result.append(
            Trial(
                plan_of(graph, number + 1),
                outcome,
                accuracy,
                (0.96 - accuracy) / 0.96,
                figures if timed else {},
                1.5,
                number=number,
            )
        )
    error = "ValueError: no numbers"
    result.append(Trial(plan_of(graph), Outcome.FAILED, error=error, number=count))
    return tuple(result)


def record(graph: OpGraph, **changes: str) -> RunRecord:
    """A run that met its target.

    Args:
        graph: the model.
        **changes: `model` and `reason` of the setup, `warning` of the report.
    """
    warning = changes.pop("warning", "the calibration data is short")
    begun = setup(graph, **changes)
    tried = trials(graph)
    best = tried[0]
    flow = begun.follow_plan(best.plan)
    seconds = {op.name: 1e-4 * (1 + index % 7) for index, op in enumerate(graph)}
    noise = {t.name: 10.0 ** (-4 + 3 * math.sin(i)) for i, t in enumerate(begun.tensors)}
    first = next(iter(noise), "x")
    report = Report(
        metric="accuracy",
        baseline_accuracy=0.96,
        accuracy=best.accuracy,
        target=0.94,
        baseline_latency=0.08,
        latency=0.024,
        speedup_low=3.1,
        speedup_high=3.5,
        batch_size=64,
        baseline_size=4_000_000,
        size=1_000_000,
        baseline_footprint=8_000_000,
        footprint=2_000_000,
        evaluations=8,
        seconds={"load": 1.0, "baseline": 0.5, "calibrate": 0.2, "search": 9.0, "probe": 2.0},
        op_counts=count_ops(graph, flow.effective),
        conversions=ConversionCounts(0, 2, 1),
        warnings=(warning,),
    )
    return RunRecord(
        begun,
        "tuning-0001",
        {"accuracy": 0.96, "seconds": 0.5},
        Observations(nsr=noise, samples=100, corrected_nsr={first: {"smooth": noise[first] / 9}}),
        tried,
        ProbeMeasurements(
            OpTimings(
                {op: {Precision.FP32: 2e-3, Precision.INT8: 5e-4} for op in begun.tunable_ops}
            ),
            {first: {"none": 0.01}},
            dict.fromkeys(seconds, 1000.0),
        ),
        RunEnd(
            "2026-11-23T12:01:00+00:00",
            True,
            best.plan,
            report,
            0,
            (tried[0], tried[2]),
            {0: 0.32, 2: 0.47, 4: 0.6},
            seconds,
            {**{name: value / 3 for name, value in seconds.items()}, f"{first}/quantize": 2e-5},
            (Conversion(first, tuple(seconds)[:4], "quantize", 2e-5),),
        ),
    )


def killed(graph: OpGraph) -> RunRecord:
    """A run that did not end."""
    return replace(record(graph), ending=None)


def unchecked(graph: OpGraph) -> RunRecord:
    """A run without data to check accuracy with, and so without trials."""
    run = record(graph)
    assert run.ending is not None
    report = replace(
        run.ending.report, baseline_accuracy=None, accuracy=None, target=None, output_sqnr_db=41.5
    )
    ending = replace(run.ending, met=None, chosen=None, report=report, finalists=(), predicted={})
    return replace(run, baseline=None, trials=(), ending=ending)


def missed(graph: OpGraph) -> RunRecord:
    """A run whose result is the FP32 model."""
    run = record(graph)
    assert run.ending is not None
    lost = tuple(
        replace(t, outcome=Outcome.MISSED, accuracy=0.5 + 0.01 * t.number, objectives={})
        for t in run.trials
    )
    report = replace(
        run.ending.report,
        accuracy=0.96,
        latency=0.08,
        size=4_000_000,
        footprint=8_000_000,
        speedup_low=None,
        speedup_high=None,
        best_rejected=lost[-1],
    )
    ending = replace(
        run.ending,
        met=False,
        plan=PrecisionPlan(),
        chosen=None,
        report=report,
        finalists=(),
        predicted={},
        result_times=run.ending.baseline_times,
        conversions=(),
    )
    return replace(run, trials=lost, ending=ending)
