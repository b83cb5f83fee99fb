"""`neural-mp audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.errors import ExitCode, epilog
from neural_mp.cli.options import ModelOptions
from neural_mp.cli.output import Output
from neural_mp.errors import ConfigurationError

if TYPE_CHECKING:
    from neural_mp.api.optimized_model import OptimizedModel
    from neural_mp.profiling.audit import Audit

EPILOG = epilog("audit tuned", "audit model.onnx --plan plan.yaml --all")


def audit(
    model: Annotated[str, typer.Argument(help="Saved result, or a model together with --plan.")],
    plan: Annotated[
        Path | None, typer.Option(help="Plan file, required unless the model is a saved result.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show all ops, not only those that differ from the plan.")
    ] = False,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Verify the plan against the kernels that run; exit code 1 if they differ."""
    from neural_mp.reporting import audit_table, audit_words

    result = _load_or_convert_model(out, model, plan, options)
    with out.working(f"Running {model}"):
        report = result.audit()
    shown = report.ops if show_all else report.findings
    if shown:
        out.show(audit_table(shown))
    out.line(audit_words(report))
    if out.as_json:
        out.document(_audit_document(result, report, show_all))
    if not report.holds:
        raise typer.Exit(ExitCode.PLAN_BROKEN)


def _load_or_convert_model(
    out: Output,
    model: str,
    plan: Path | None,
    options: ModelOptions,
) -> OptimizedModel:
    from neural_mp.api.optimized_model import load
    from neural_mp.api.replay import convert_with_plan
    from neural_mp.api.saved_model import is_saved_model

    if is_saved_model(model):
        if plan is not None:
            raise ConfigurationError(
                f"--plan requires a model, got the saved result {model!r}, which has its own plan; "
                f"remove --plan"
            )
        with out.working(f"Loading {model}"):
            return load(model)
    if plan is None:
        raise ConfigurationError(
            f"nothing to audit: {model!r} is not a saved result and has no plan; give the folder "
            f"of a saved result, or --plan"
        )
    with out.working(f"Converting {model}"):
        return convert_with_plan(model, plan, framework=options.framework, inputs=options.inputs)


def _audit_document(result: OptimizedModel, report: Audit, show_all: bool) -> dict[str, Any]:
    return {
        "framework": result.framework,
        "holds": report.holds,
        "complete": report.complete,
        "planned": {"ops": len(report.ops), "lowered": report.lowered},
        "verdicts": {verdict.value: count for verdict, count in report.counts().items()},
        "ops": [op.to_dict() for op in (report.ops if show_all else report.findings)],
    }
