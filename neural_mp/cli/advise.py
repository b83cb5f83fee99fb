"""`neural-mp advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import TrustOption
from neural_mp.cli.output import Output
from neural_mp.errors import ConfigurationError
from neural_mp.util.validators import MOST

if TYPE_CHECKING:
    from neural_mp.training.advice_report import Advice

EPILOG = epilog("advise conf.yaml --precision fp16 --output plan.yaml")


def advise(
    conf: Annotated[Path, typer.Argument(help="Tuning YAML with calibration data.")],
    model: Annotated[
        str | None,
        typer.Option(help="Keras file or module:attribute; default: model: name in the YAML."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Keras loss or module:attribute; default: the loss of the model."),
    ] = None,
    precision: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    steps: Annotated[int, typer.Option(min=0, max=MOST, help="Training steps in float32.")] = 100,
    limit: Annotated[float, typer.Option(help="Upper bound of the gradient NSR.")] = 0.01,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Plan file to write, for apply_plan.")
    ] = None,
    trust: TrustOption = None,
    *,
    out: Output,
) -> None:
    """Find the layers that must stay in float32 in 16-bit training."""
    from neural_mp.api.advise import advise_from_file

    if output is not None and not output.parent.is_dir():  # fail before the training, not after
        raise ConfigurationError(
            f"--output {output}: the folder {str(output.parent)!r} must exist; create it"
        )
    with out.working(f"Training as configured in {conf}"):
        advice = advise_from_file(
            conf, model, loss, precision, steps=steps, limit=limit, trust=trust or ()
        )
    out.show(advice.table)
    for warning in advice.warnings:
        out.warn(warning)
    if output is not None:
        advice.save_plan(output)
        out.line(f"saved to {output}")
    if out.as_json:
        out.document(_advice_document(advice, output))


def _advice_document(advice: Advice, saved: Path | None) -> dict[str, Any]:
    return {
        "precision": advice.precision.value,
        "keep": list(advice.keep),
        "layers": [
            {
                "name": layer.name,
                "class": layer.kind,
                "keep": layer.keep,
                "noise": layer.noise,
                "reason": layer.reason,
            }
            for layer in advice.layers.values()
        ],
        "noise": advice.noise,
        "steps": advice.steps,
        "warnings": list(advice.warnings),
        "saved_to": saved,
    }
