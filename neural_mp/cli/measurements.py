"""`neural-mp benchmark`, `compare`, `sensitivity` and `advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.options import (
    BatchSizeOption,
    CsvOption,
    DataOption,
    ModelArgument,
    ModelOptions,
    SamplesOption,
    ShapeOption,
    TrustOption,
)
from neural_mp.cli.output import Output
from neural_mp.errors import ConfigurationError
from neural_mp.io.limits import trusting
from neural_mp.util.validators import MOST

if TYPE_CHECKING:
    from neural_mp.reporting.tables import BenchmarkRow
    from neural_mp.training.advice import Advice


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
        from neural_mp.api.input_data import make_random_inputs
        from neural_mp.api.named_models import benchmark_models
        from neural_mp.reporting import build_benchmark_table

        inputs = make_random_inputs(input_shape or ())
        with out.show_progress(f"Loading and running {', '.join(models)}"):
            rows = benchmark_models(models, batch_size, warmup, iterations, inputs)
        out.show_table(build_benchmark_table(rows))
        if out.as_json:
            out.show_document({"models": [_make_row_document(row) for row in rows]})


def _make_row_document(row: BenchmarkRow) -> dict[str, Any]:
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
    out.check_single_format(as_csv)
    from neural_mp.api.compare import compare_files
    from neural_mp.reporting.displays import (
        MARKED,
        build_comparison_tables,
        format_comparison_csv,
    )

    if data is None:
        out.show_warning(
            "the models are compared on random inputs; results may differ on your data; give --data"
        )
    with out.show_progress(f"Comparing {a} and {b}"):
        comparison = compare_files(
            a,
            b,
            data,
            samples=samples,
            batch_size=batch_size,
            framework=options.framework,
            inputs=options.random_inputs,
            trust=options.trust,
        )
    if as_csv:
        out.show_line(format_comparison_csv(comparison, worst).rstrip())
    else:
        out.show_table(build_comparison_tables(comparison, worst))
    if out.as_json:
        document = comparison.to_dict()
        document["worst"] = [layer.name for layer in comparison.worst(worst or MARKED)]
        out.show_document(document)


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
    out.check_single_format(as_csv)
    from neural_mp.api.named_models import measure_model_sensitivity
    from neural_mp.api.saved_model import is_saved_model
    from neural_mp.reporting import LiveListener, build_sensitivity_table, create_error_console
    from neural_mp.tuning.listener import Listener

    has_data = is_saved_model(model) or Path(model).suffix in (".yaml", ".yml")
    if data is None and not has_data:
        out.show_warning(
            "noise is measured on random inputs and may differ on your data; give --data"
        )
    sensitivities = measure_model_sensitivity(
        model,
        data,
        precisions=precision or (),
        samples=samples,
        batch_size=batch_size,
        most=most,
        framework=options.framework,
        inputs=options.random_inputs,
        listener=Listener() if out.quiet else LiveListener(create_error_console(), summary=False),
        trust=options.trust,
    )
    if as_csv:
        out.show_line(sensitivities.to_csv().rstrip())
    else:
        out.show_table(build_sensitivity_table(sensitivities))
    if out.as_json:
        out.show_document({"decisions": sensitivities.to_dict()})


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
    from neural_mp.api.named_models import advise_from_file

    if output is not None and not output.parent.is_dir():  # fail before the training, not after
        raise ConfigurationError(
            f"--output {output}: the folder {str(output.parent)!r} must exist; create it"
        )
    with out.show_progress(f"Training as configured in {conf}"):
        advice = advise_from_file(
            conf, model, loss, precision, steps=steps, limit=limit, trust=trust or ()
        )
    if output is not None:
        advice.save_plan(output)
        out.saved = output
    out.show_table(advice.table)
    for warning in advice.warnings:
        out.show_warning(warning)
    if output is not None:
        out.show_line(f"saved to {output}")
    if out.as_json:
        out.show_document(_make_advice_document(advice, output))


def _make_advice_document(advice: Advice, saved: Path | None) -> dict[str, Any]:
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
