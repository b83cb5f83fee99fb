"""`neural-mp tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neural_mp.cli.errors import ExitCode, epilog
from neural_mp.cli.options import SaveOption, TargetOption, TrustOption
from neural_mp.cli.output import Output, emit_result

EPILOG = epilog("tune conf.yaml --output tuned", "tune conf.yaml --json | jq .report.speedup")


def tune(
    conf: Annotated[Path, typer.Argument(help="Tuning YAML.")],
    model: Annotated[
        str | None, typer.Option(help="Model to tune; overrides model: name in the YAML.")
    ] = None,
    output: SaveOption = None,
    target: TargetOption = None,
    runtime: Annotated[
        str | None,
        typer.Option(help="Runtime of the result: auto, source or a name; default: auto."),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help="latency, throughput, footprint or modelsize; default: from the YAML."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Workers: a number of processes, ray or ray:HOST:PORT; default: from the YAML.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Resume the latest run of the same model in the workspace.")
    ] = False,
    cache: Annotated[
        bool, typer.Option(help="Reuse measurements of earlier runs in the workspace.")
    ] = True,
    fail_if_missed: Annotated[
        bool, typer.Option("--fail-if-missed", help="Save a result only if the target is met.")
    ] = False,
    trust: TrustOption = None,
    *,
    out: Output,
) -> None:
    """Tune a model as configured in a YAML file."""
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.api.saved_model import check_destination
    from neural_mp.config import load_settings
    from neural_mp.core.enums import AUTO_RUNTIME
    from neural_mp.reporting import LiveListener, error_console
    from neural_mp.tuning.listener import Listener

    if output is not None:
        check_destination(output)  # fail before the search, not after
    settings = load_settings(conf, trust=trust or ())
    converter = MixedPrecision(settings, trust=trust or ())
    if model is not None:
        converter.model = model
    if target is not None:
        converter.target = target
    converter.runtime = runtime or settings.model.runtime or AUTO_RUNTIME
    if objective is not None:
        converter.objective = objective
    if workers is not None:
        converter.workers = workers
    if resume:
        converter.resume = True
    if not cache:
        converter.cache = False
    out.kept = "finished trials are kept; continue with --resume"
    listener = Listener() if out.quiet else LiveListener(error_console(), summary=False)
    converter.listener = listener
    result = converter()
    missed = result.met is False
    emit_result(result, out, None if missed and fail_if_missed else output)
    if missed and fail_if_missed and output is not None:
        out.warn(f"the target is not met, so that nothing is saved to {output}")
    if missed:
        raise typer.Exit(
            ExitCode.NOT_FASTER if result.report.only_slower else ExitCode.TARGET_MISSED
        )
