"""`neural-mp convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import (
    FrameworkOption,
    JsonOption,
    ModelArgument,
    QuietOption,
    ShapeOption,
    TargetOption,
    TrustOption,
    VerboseOption,
)
from neural_mp.cli.output import Output, emit_result
from neural_mp.io.trust import trusting

EPILOG = epilog("convert model.pt2 --plan tuned/plan.yaml --output replayed")


def convert(
    model: ModelArgument,
    plan: Annotated[Path, typer.Option(help="Plan file, as written by tune and save_plan.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to save the result to.")],
    target: TargetOption = None,
    framework: FrameworkOption = None,
    input_shape: ShapeOption = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = 0,
) -> None:
    """Convert a model by a plan file, without search or data."""
    with Output(as_json, quiet, verbose) as out, trusting(trust or ()):
        from neural_mp.api.input_data import random_inputs
        from neural_mp.api.replay import convert_with_plan
        from neural_mp.api.saved_model import check_destination
        from neural_mp.core import hardware

        check_destination(output)
        inputs = random_inputs(input_shape or ())
        with out.working(f"Converting {model}"):
            result = convert_with_plan(
                model,
                plan,
                framework=framework,
                inputs=inputs,
                target=target or hardware.HOST_TARGET,
            )
        emit_result(result, out, output)
