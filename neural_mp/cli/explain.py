"""`neural-mp explain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import ModelArgument, ModelOptions
from neural_mp.cli.output import Output
from neural_mp.cli.stored_runs import read_run
from neural_mp.errors import ConfigurationError

if TYPE_CHECKING:
    from neural_mp.api.explain import Explanation
    from neural_mp.core.graph import Op
    from neural_mp.core.plan import PrecisionPlan
    from neural_mp.core.precision import Precision
    from neural_mp.runs.report import RunRecord
    from neural_mp.runs.stage_noise import StageNoise

EPILOG = epilog("explain model.onnx Softmax_7 --precision bf16")


def explain(
    model: ModelArgument,
    op: Annotated[str, typer.Argument(help="Name or pattern of an op or layer, as for op_wise.")],
    precision: Annotated[
        list[str] | None, typer.Option(help="int8, bf16 or fp16; default: all.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Plan file to explain.")] = None,
    workspace: Annotated[
        Path | None,
        typer.Option(help="Workspace of a run, or a saved result, to explain with its noise."),
    ] = None,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Explain the precision of an op: INT8, 16 bits or FP32, and why."""
    from neural_mp.api.explain import explained
    from neural_mp.core.precision import parse_precisions
    from neural_mp.reporting import explanation_table
    from neural_mp.reporting.stage_noise import stage_words

    if plan is not None and workspace is not None:
        raise ConfigurationError("explain takes --plan or --workspace, got both; remove one")
    record = None if workspace is None else read_run(workspace)
    precisions = parse_precisions(",".join(precision or ["int8", "bf16", "fp16"]))
    loaded = options.load(model, out)
    explained_op, explanations = explained(loaded, op, precisions, plan or _plan_of_noise(record))
    rows = {
        p: (explanation.list, explanation.runs_in, explanation.reason)
        for p, explanation in explanations.items()
    }
    out.show(explanation_table(explained_op, rows))
    noise = _stage_noise(record)
    text = "" if noise is None else stage_words(noise, explained_op.name)
    if text:
        out.line(f"SQNR of its result against FP32: {text}")
    if out.as_json:
        out.document(_explanation_document(explained_op, explanations, noise))


def _plan_of_noise(record: RunRecord | None) -> PrecisionPlan | None:
    if record is None or record.ending is None:
        return None
    trained = [trial for trial in record.trials if trial.trained]
    return trained[-1].plan if trained else record.ending.plan


def _stage_noise(record: RunRecord | None) -> StageNoise | None:
    return None if record is None or record.ending is None else record.ending.report.stage_noise


def _explanation_document(
    op: Op, explanations: Mapping[Precision, Explanation], noise: StageNoise | None
) -> dict[str, Any]:
    precisions = {
        precision.value: {
            "list": explanation.list.name if explanation.list else None,
            "decision": explanation.runs_in.value,
            "reason": explanation.reason,
        }
        for precision, explanation in explanations.items()
    }
    by_stage = None if noise is None else noise.ops.get(op.name)
    noises = None if by_stage is None else dict(by_stage)
    return {"op": op.name, "type": op.type, "precisions": precisions, "stage_noise": noises}
