"""`neural-mp compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import (
    BatchSizeOption,
    CsvOption,
    DataOption,
    ModelOptions,
    SamplesOption,
)
from neural_mp.cli.output import Output
from neural_mp.util.validators import MOST

EPILOG = epilog("compare model.pt2 tuned --data images.npy", "compare tuned other --data conf.yaml")


def compare(
    a: Annotated[str, typer.Argument(help="Reference model: a model file or a saved result.")],
    b: Annotated[str, typer.Argument(help="Model to compare with A, e.g. the tuned result of A.")],
    data: DataOption = None,
    samples: SamplesOption = 100,
    batch_size: BatchSizeOption = None,
    worst: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Show only the N ops that introduce the most quantization noise."
        ),
    ] = None,
    as_csv: CsvOption = False,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Compare two models of one origin op by op, and show the first divergence."""
    out.one_form(as_csv)
    from neural_mp.api.compare import compare_files
    from neural_mp.reporting.comparison import MARKED, comparison_csv, comparison_table

    if data is None:
        out.warn(
            "the models are compared on random inputs; results may differ on your data; give --data"
        )
    with out.working(f"Comparing {a} and {b}"):
        comparison = compare_files(
            a,
            b,
            data,
            samples=samples,
            batch_size=batch_size,
            framework=options.framework,
            inputs=options.inputs,
            trust=options.trust,
        )
    if as_csv:
        out.line(comparison_csv(comparison, worst).rstrip())
    else:
        out.show(comparison_table(comparison, worst))
    if out.as_json:
        document = comparison.to_dict()
        document["worst"] = [layer.name for layer in comparison.worst(worst or MARKED)]
        out.document(document)
