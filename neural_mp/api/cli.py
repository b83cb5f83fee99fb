"""The `neural-mp` command."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from neural_mp.errors import ConfigurationError, NeuralMPError

if TYPE_CHECKING:
    from neural_mp.adaptors.loaded_model import AnyModel
    from neural_mp.api.optimized_model import OptimizedModel

app = typer.Typer(
    name="neural-mp",
    help="The fastest form of a trained model that still meets your accuracy target.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_console = Console()
_errors = Console(stderr=True)

ModelArgument = Annotated[
    str, typer.Argument(help="A model file or folder, or module:attribute of your own.")
]
FrameworkOption = Annotated[str | None, typer.Option(help="Where it is not found by itself.")]
TargetOption = Annotated[
    str | None,
    typer.Option(help="this machine, portable, avx2, avx512, vnni, amx or arm-dotprod."),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(help="An input's shape, 2,3,224,224 or int64:2,128; once for every input."),
]


@app.command()
def tune(
    conf: Annotated[Path, typer.Argument(help="The tuning YAML.")],
    model: Annotated[str | None, typer.Option(help="Overrides model: name in the YAML.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to save the result in.")] = None,
    target: TargetOption = None,
    resume: Annotated[bool, typer.Option(help="Go on with the workspace's latest run.")] = False,
) -> None:
    """Tune a model as a YAML file says; exit with 1 if the target was not met."""
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.api.saved_folder import check_destination
    from neural_mp.reporting import LiveListener, result_tables

    if output is not None:
        check_destination(output)  # now, not after hours of tuning
    converter = MixedPrecision(conf)
    if model is not None:
        converter.model = model
    if target is not None:
        converter.target = target
    if resume:
        converter.resume = True
    converter.listener = LiveListener(_errors, summary=False)
    result = converter()
    _console.print(result_tables(result.report, result.met))
    if output is not None:
        _save(result, output)
    if result.met is False:
        raise typer.Exit(1)


@app.command()
def inspect(
    model: ModelArgument,
    target: TargetOption = None,
    framework: FrameworkOption = None,
    input_shape: ShapeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show every op, its type, and what it can run in here; of a saved result, its plan."""
    from neural_mp.api.deployment import where_right
    from neural_mp.api.optimized_model import load
    from neural_mp.api.saved_folder import is_saved_model
    from neural_mp.core import hardware
    from neural_mp.reporting import capability_table, plan_table

    if is_saved_model(model):
        saved = load(model)
        if as_json:
            typer.echo(json.dumps({"plan": saved.plan.to_dict(), "right_on": saved.right_on}))
        else:
            _console.print(plan_table(saved.plan, saved.right_on))
        return
    loaded = _load(model, framework, input_shape)
    there = hardware.detect().converting_for(target or hardware.THIS)
    space = loaded.adaptor.space(loaded.held, there)
    if not as_json:
        _console.print(capability_table(space))
        if loaded.adaptor.wide_kernels(loaded.held):
            _console.print(f"right on {where_right(loaded)}", soft_wrap=True)
        return
    rows = [
        {
            "name": op.name,
            "type": op.type,
            "inputs": list(op.inputs),
            "precisions": [p.value for p in space.capabilities[op.name].precisions],
            "emulated": sorted(p.value for p in space.capabilities[op.name].emulated),
            "reasons": {p.value: r for p, r in space.capabilities[op.name].reasons.items()},
        }
        for op in space.graph
    ]
    typer.echo(json.dumps(rows, indent=1))


@app.command()
def explain(
    model: ModelArgument,
    op: Annotated[str, typer.Argument(help="The op's name, as inspect shows it.")],
    precision: Annotated[
        list[str] | None, typer.Option(help="bf16 or fp16; both by default.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Under this plan file.")] = None,
    framework: FrameworkOption = None,
    input_shape: ShapeOption = None,
) -> None:
    """Say why an op runs in 16 bits, or does not: its list, and what spreads to it."""
    from neural_mp.api.explain import explained
    from neural_mp.core.precision import parse_precisions
    from neural_mp.reporting import paint_table

    loaded = _load(model, framework, input_shape)
    precisions = parse_precisions(",".join(precision or ["bf16", "fp16"]))
    space, paintings = explained(loaded, op, precisions, plan)
    _console.print(paint_table(space, op, paintings))


@app.command()
def convert(
    model: ModelArgument,
    plan: Annotated[Path, typer.Option(help="A plan file, as tune and save_plan write it.")],
    output: Annotated[Path, typer.Option(help="Folder to save the result in.")],
    target: TargetOption = None,
    framework: FrameworkOption = None,
    input_shape: ShapeOption = None,
) -> None:
    """Convert a model as a plan file says, without any search or data."""
    from neural_mp.api.random_inputs import random_inputs
    from neural_mp.api.replay import convert_with_plan
    from neural_mp.core import hardware
    from neural_mp.reporting import result_tables

    inputs = random_inputs(input_shape or ())
    result = convert_with_plan(
        model, plan, framework=framework, inputs=inputs, target=target or hardware.THIS
    )
    _console.print(result_tables(result.report, result.met))
    _save(result, output)


@app.command()
def benchmark(
    models: Annotated[list[str], typer.Argument(help="Models or saved results, in any mix.")],
    input_shape: ShapeOption = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples a batch.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds not counted.")] = 5,
    iterations: Annotated[int, typer.Option(min=1, help="Rounds counted.")] = 50,
) -> None:
    """Compare latency, throughput and size, by interleaved runs."""
    from neural_mp.api.benchmark import benchmark_models
    from neural_mp.api.random_inputs import random_inputs
    from neural_mp.reporting import benchmark_table

    inputs = random_inputs(input_shape or ())
    rows = benchmark_models(models, batch_size, warmup, iterations, inputs)
    _console.print(benchmark_table(rows))


@app.command()
def advise(
    conf: Annotated[Path, typer.Argument(help="A tuning YAML, with calibration data.")],
    model: Annotated[
        str | None, typer.Option(help="A Keras file or module:attribute; model: name by default.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="A Keras loss or module:attribute; by default the model's own."),
    ] = None,
    precision: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    steps: Annotated[int, typer.Option(min=0, help="Steps of the run in float32.")] = 100,
    limit: Annotated[float, typer.Option(help="How much noise gradients may have.")] = 0.01,
    output: Annotated[Path | None, typer.Option(help="A plan file for apply_plan.")] = None,
) -> None:
    """Say which layers must stay in float32 while a model is trained in 16 bits."""
    from neural_mp.api.advise import advise_from_file

    if output is not None:
        _check_folder(output)  # now, not after a training
    found = advise_from_file(conf, model, loss, precision, steps=steps, limit=limit)
    _console.print(found.table)
    for warning in found.warnings:
        _errors.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if output is not None:
        found.save_plan(output)
        _console.print(f"saved to {output}", soft_wrap=True)


@app.command()
def hardware(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what this machine runs natively, and how the integer kernels of each framework count."""
    from neural_mp.adaptors.registry import installed_products
    from neural_mp.core import hardware as machine
    from neural_mp.core.precision import Precision
    from neural_mp.reporting import hardware_table

    found = machine.detect()
    products = installed_products(found)
    if as_json:
        supports = {p.value: vars(found.support(p)) for p in Precision}
        described = {"name": found.name, "cores": found.cores, "cpu": supports}
        typer.echo(json.dumps({**described, "byte_products": products}, indent=1))
        return
    _console.print(hardware_table(found, products))


def _check_folder(file: Path) -> None:
    if not file.parent.is_dir():
        raise ConfigurationError(f"--output {file}: there is no folder {str(file.parent)!r}")


def _save(result: OptimizedModel, output: Path) -> None:
    logging.getLogger("neural_mp.api.optimized_model").setLevel(logging.ERROR)  # said below instead
    result.save(output)
    _console.print(f"saved to {output}; right on {result.right_on}", soft_wrap=True)


def _load(model: str, framework: str | None, input_shape: list[str] | None) -> AnyModel:
    from neural_mp.api.loading import load_source
    from neural_mp.api.random_inputs import random_inputs

    return load_source(model, framework, random_inputs(input_shape or ()))


def main() -> None:
    """Run the command; an error we raise on purpose is one line, not a traceback."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow tells much, before and between
    try:
        app(standalone_mode=True)
    except NeuralMPError as error:
        _errors.print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
