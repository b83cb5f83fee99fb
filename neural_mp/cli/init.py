"""`neural-mp init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import ModelArgument, ModelOptions
from neural_mp.cli.output import Output
from neural_mp.cli.search_options import EvaluationDataOption, LabelOption
from neural_mp.errors import ConfigurationError

EPILOG = epilog("init net.onnx --data test.npz && neural-mp tune conf.yaml --output tuned")


def init(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Tuning file to write.")] = Path(
        "conf.yaml"
    ),
    metric: Annotated[
        str | None, typer.Option(help="Metric; default: by the shape of the output.")
    ] = None,
    data: EvaluationDataOption = None,
    label: LabelOption = None,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Write a commented tuning file for a model."""
    from neural_mp.api.saved_model import writing
    from neural_mp.api.tuning_source import tuning_template
    from neural_mp.config import parse_settings
    from neural_mp.metrics import build_metric

    if output.exists():
        raise ConfigurationError(f"{str(output)!r} exists already; choose another --output")
    if metric is not None and ":" not in metric:
        build_metric(metric)
    loaded = options.load(model, out)
    with out.working(f"Reading the capabilities of {model}"):
        text = tuning_template(loaded, model, output, metric, data, label)
    parse_settings(text, str(output))
    with writing(output):
        output.write_text(text, encoding="utf-8")
    out.line(f"saved to {output}; tune with: neural-mp tune {output} --output tuned")
    if out.as_json:
        out.document({"saved_to": output, "text": text})
