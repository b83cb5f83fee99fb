"""`neural-mp convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import ModelArgument, ModelOptions, TargetOption
from neural_mp.cli.output import Output, emit_result

EPILOG = epilog("convert model.pt2 --plan tuned/plan.yaml --output replayed")


def convert(
    model: ModelArgument,
    plan: Annotated[Path, typer.Option(help="Plan file, as written by tune and save_plan.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to save the result to.")],
    target: TargetOption = None,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Convert a model by a plan file, without search or data."""
    from neural_mp.api.replay import convert_with_plan
    from neural_mp.api.saved_model import check_output
    from neural_mp.core import hardware

    check_output(output)
    with out.working(f"Converting {model}"):
        result = convert_with_plan(
            model,
            plan,
            framework=options.framework,
            inputs=options.inputs,
            target=target or hardware.HOST_TARGET,
        )
    emit_result(result, out, output)
