"""`neural-mp benchmark`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import ShapeOption, TrustOption
from neural_mp.cli.output import Output
from neural_mp.io.trust import trusting
from neural_mp.util.validators import MOST

if TYPE_CHECKING:
    from neural_mp.reporting.tables import BenchmarkRow

EPILOG = epilog("benchmark model.pt2 tuned --batch-size 64")


def benchmark(
    models: Annotated[list[str], typer.Argument(help="Models or saved results.")],
    input_shape: ShapeOption = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Samples per batch.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, max=MOST, help="Warm-up rounds.")] = 5,
    iterations: Annotated[int, typer.Option(min=1, max=MOST, help="Measured rounds.")] = 50,
    trust: TrustOption = None,
    *,
    out: Output,
) -> None:
    """Compare latency, throughput and size in interleaved rounds."""
    with trusting(trust or ()):
        from neural_mp.api.benchmark import benchmark_models
        from neural_mp.api.input_data import random_inputs
        from neural_mp.reporting import benchmark_table

        inputs = random_inputs(input_shape or ())
        with out.working(f"Loading and running {', '.join(models)}"):
            rows = benchmark_models(models, batch_size, warmup, iterations, inputs)
        out.show(benchmark_table(rows))
        if out.as_json:
            out.document({"models": [_row_document(row) for row in rows]})


def _row_document(row: BenchmarkRow) -> dict[str, Any]:
    return {
        "model": row.name,
        "latency": row.latency,
        "batch_size": row.samples,
        "samples_per_second": row.samples / row.latency,
        "size": row.size,
        "speed": row.speed.value,
        "speed_low": row.speed.low,
        "speed_high": row.speed.high,
    }
