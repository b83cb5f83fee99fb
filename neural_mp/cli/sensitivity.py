"""`neural-mp sensitivity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import (
    BatchSizeOption,
    CsvOption,
    DataOption,
    ModelArgument,
    ModelOptions,
    SamplesOption,
)
from neural_mp.cli.output import Output
from neural_mp.util.validators import MOST

EPILOG = epilog(
    "sensitivity model.onnx --data images.npy --most 10", "sensitivity conf.yaml --csv > costs.csv"
)


def sensitivity(
    model: ModelArgument,
    data: DataOption = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="int8, bf16 or fp16; default: int8 and bf16.")
    ] = None,
    samples: SamplesOption = 100,
    batch_size: BatchSizeOption = None,
    most: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST, help="Measure the output noise of the N noisiest decisions only."
        ),
    ] = None,
    as_csv: CsvOption = False,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Show the accuracy cost and the speed gain of each tensor and op."""
    out.one_form(as_csv)
    from neural_mp.api.saved_model import is_saved_model
    from neural_mp.api.sensitivity import sensitivity_of
    from neural_mp.reporting import LiveListener, error_console, sensitivity_table
    from neural_mp.tuning.listener import Listener

    has_data = is_saved_model(model) or Path(model).suffix in (".yaml", ".yml")
    if data is None and not has_data:
        out.warn("noise is measured on random inputs and may differ on your data; give --data")
    sensitivities = sensitivity_of(
        model,
        data,
        precisions=precision or (),
        samples=samples,
        batch_size=batch_size,
        most=most,
        framework=options.framework,
        inputs=options.inputs,
        listener=Listener() if out.quiet else LiveListener(error_console(), summary=False),
        trust=options.trust,
    )
    if as_csv:
        out.line(sensitivities.to_csv().rstrip())
    else:
        out.show(sensitivity_table(sensitivities))
    if out.as_json:
        out.document({"decisions": sensitivities.to_dict()})
