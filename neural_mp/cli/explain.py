"""`neural-mp explain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import ModelArgument, ModelOptions
from neural_mp.cli.output import Output

if TYPE_CHECKING:
    from neural_mp.api.explain import Explanation
    from neural_mp.core.graph import Op
    from neural_mp.core.precision import Precision

EPILOG = epilog("explain model.onnx Softmax_7 --precision bf16")


def explain(
    model: ModelArgument,
    op: Annotated[str, typer.Argument(help="Name or pattern of an op or layer, as for op_wise.")],
    precision: Annotated[
        list[str] | None, typer.Option(help="int8, bf16 or fp16; default: all.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Plan file to explain.")] = None,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Explain the precision of an op: INT8, 16 bits or FP32, and why."""
    from neural_mp.api.explain import explained
    from neural_mp.core.precision import parse_precisions
    from neural_mp.reporting import explanation_table

    precisions = parse_precisions(",".join(precision or ["int8", "bf16", "fp16"]))
    loaded = options.load(model, out)
    explained_op, found = explained(loaded, op, precisions, plan)
    rows = {p: (said.list, said.runs_in, said.reason) for p, said in found.items()}
    out.show(explanation_table(explained_op, rows))
    if out.as_json:
        out.document(_document(explained_op, found))


def _document(op: Op, found: Mapping[Precision, Explanation]) -> dict[str, Any]:
    precisions = {
        precision.value: {
            "list": said.list.name if said.list else None,
            "decision": said.runs_in.value,
            "reason": said.reason,
        }
        for precision, said in found.items()
    }
    return {"op": op.name, "type": op.type, "precisions": precisions}
