"""`neural-mp tune`, `tune-many`, `init` and `convert`."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neural_mp.cli.errors import ExitCode
from neural_mp.cli.options import (
    EvaluationDataOption,
    LabelOption,
    ModelArgument,
    ModelOptions,
    SaveOption,
    SearchOptions,
    TargetOption,
    TrustOption,
)
from neural_mp.cli.output import Output, disabled_logger, emit_result
from neural_mp.errors import ConfigurationError

if TYPE_CHECKING:
    from neural_mp.api.optimized_model import OptimizedModel


def tune(
    source: Annotated[
        str, typer.Argument(help="Tuning YAML, or a model with --data and --metric or --task.")
    ],
    output: SaveOption = None,
    fail_if_missed: Annotated[
        bool, typer.Option("--fail-if-missed", help="Save a result only if the target is met.")
    ] = False,
    trust: TrustOption = None,
    *,
    search: SearchOptions,
    out: Output,
) -> None:
    """Tune a model as configured in a YAML file, by options, or both."""
    from neural_mp.api.saved_model import check_output
    from neural_mp.api.tuning_source import is_model, open_tuning_source
    from neural_mp.core.enums import AUTO_RUNTIME
    from neural_mp.reporting import LiveListener, create_error_console
    from neural_mp.tuning.listener import Listener

    if output is not None:
        check_output(output)  # fail before the search, not after
    finish: Callable[[OptimizedModel], OptimizedModel] = copy
    if search.task is not None:
        run = search.prepare_task(source, trust or ())
        converter, finish = run.converter, run.finish
    else:
        converter = open_tuning_source(source, trust or ())
        if is_model(source):
            search.require_evaluation(source)
    search.apply_to(converter)
    converter.set_default("runtime", AUTO_RUNTIME)
    out.continuation = "finished trials are kept; continue with --resume"
    listener = Listener() if out.quiet else LiveListener(create_error_console(), summary=False)
    converter.listener = listener
    result = finish(converter())
    missed = result.met is False
    emit_result(result, out, None if missed and fail_if_missed else output)
    if missed and fail_if_missed and output is not None:
        out.show_warning(f"the target is not met, so that nothing is saved to {output}")
    if missed:
        raise typer.Exit(
            ExitCode.NOT_FASTER if result.report.only_slower else ExitCode.TARGET_MISSED
        )


def tune_many(
    files: Annotated[
        list[str], typer.Argument(help="Tuning YAMLs or folders of tuning YAMLs; one job each.")
    ],
    workers: Annotated[
        str, typer.Option(help="Workers: a number of processes, ray or ray:HOST:PORT.")
    ] = "1",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for results, logs and the summary page.")
    ] = Path("neural_mp_jobs"),
    trust: TrustOption = None,
    *,
    out: Output,
) -> None:
    """Tune many models, one process each; finished jobs are not repeated."""
    from neural_mp import jobs
    from neural_mp.reporting.jobs import JobsListener, LiveJobs, build_jobs_table

    out.continuation = "finished jobs are kept; continue with the same command"
    listener = JobsListener() if out.quiet else LiveJobs()
    results = jobs.tune_many(
        files, workers=workers, output=output, listener=listener, trust=trust or ()
    )
    out.saved = results.page
    out.show_table(build_jobs_table(results.outcomes))
    out.show_line(f"page saved to {results.page}")
    if out.as_json:
        outcomes = [job.to_dict() for job in results.outcomes]
        out.show_document({"jobs": outcomes, "page": results.page})
    if results.failed or results.missed:
        raise typer.Exit(ExitCode.JOB_FAILED)


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
    from neural_mp.api.saved_model import name_target
    from neural_mp.api.tuning_source import write_tuning_template
    from neural_mp.config import parse_settings
    from neural_mp.metrics import build_metric

    if output.exists():
        raise ConfigurationError(f"{str(output)!r} exists already; choose another --output")
    if metric is not None and ":" not in metric:
        build_metric(metric)
    loaded = options.load_model(model, out)
    with out.show_progress(f"Reading the capabilities of {model}"):
        text = write_tuning_template(loaded, model, output, metric, data, label)
    parse_settings(text, str(output))
    with name_target(output):
        output.write_text(text, encoding="utf-8")
    out.saved = output
    out.show_line(f"saved to {output}; tune with: neural-mp tune {output} --output tuned")
    if out.as_json:
        out.show_document({"saved_to": output, "text": text})


def convert(
    model: ModelArgument,
    plan: Annotated[Path, typer.Option(help="Plan file, as written by tune and save_plan.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to save the result to.")],
    target: TargetOption = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse a plan that changes ops beyond those edited."),
    ] = False,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Convert a model by a plan file, without search or data."""
    from neural_mp.api.replay import convert_with_plan
    from neural_mp.api.saved_model import check_output

    check_output(output)
    progress = out.show_progress(f"Converting {model}")
    with progress, disabled_logger("neural_mp.api.replay"):  # the report has the same warnings
        result = convert_with_plan(
            model,
            plan,
            framework=options.framework,
            inputs=options.random_inputs,
            target=target,
            strict=strict,
        )
    emit_result(result, out, output)
