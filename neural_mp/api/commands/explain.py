"""`neural-mp explain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.api.commands.exit_codes import epilog
from neural_mp.api.commands.options import (
    FrameworkOption,
    JsonOption,
    ModelArgument,
    QuietOption,
    ShapeOption,
    VerboseOption,
)
from neural_mp.api.commands.output import Output

if TYPE_CHECKING:
    from neural_mp.amp import Painting
    from neural_mp.core.precision import Precision
    from neural_mp.space import TuningSpace

EPILOG = epilog("explain model.onnx Softmax_7 --precision bf16")


def explain(
    model: ModelArgument,
    op: Annotated[str, typer.Argument(help="The op's name, as inspect shows it.")],
    precision: Annotated[
        list[str] | None, typer.Option(help="bf16 or fp16; both by default.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Under this plan file.")] = None,
    framework: FrameworkOption = None,
    input_shape: ShapeOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = 0,
) -> None:
    """Say why an op runs in 16 bits, or does not: its list, and what spreads to it."""
    with Output(as_json, quiet, verbose) as out:
        from neural_mp.api.explain import explained
        from neural_mp.core.precision import parse_precisions
        from neural_mp.reporting import paint_table

        precisions = parse_precisions(",".join(precision or ["bf16", "fp16"]))
        loaded = out.load(model, framework, input_shape)
        space, paintings = explained(loaded, op, precisions, plan)
        out.show(paint_table(space, op, paintings))
        if as_json:
            out.document(_document(space, op, paintings))


def _document(
    space: TuningSpace, op: str, paintings: Mapping[Precision, Painting]
) -> dict[str, Any]:
    from neural_mp.reporting.tables import decision

    found = {}
    for precision, painting in paintings.items():
        paint = painting.paints[op]
        found[precision.value] = {
            "list": paint.list.name if paint.list else None,
            "decision": decision(paint, precision).value,
            "reason": paint.reason,
        }
    return {"op": op, "type": space.graph[op].type, "precisions": found}
