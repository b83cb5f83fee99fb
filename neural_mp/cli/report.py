"""`neural-mp report`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.documents import SCHEMA, trial_document
from neural_mp.cli.errors import epilog
from neural_mp.cli.output import Output
from neural_mp.cli.stored_runs import read_run

if TYPE_CHECKING:
    from neural_mp.runs.report import RunRecord

EPILOG = epilog(
    "report neural_mp_workspace",
    "report workspace --model 1f0c --run 3 --output third.html",
    "report workspace --run 2 --against 1",
)


def report(
    workspace: Annotated[
        Path | None, typer.Argument(help="Workspace of a run, or a saved result.")
    ] = None,
    number: Annotated[
        int | None, typer.Option("--run", help="Number of the run; default: the latest.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Prefix of the model fingerprint, if the storage has several models."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    storage: Annotated[
        str | None,
        typer.Option(help="Optuna storage URL, if runs are not stored in the workspace."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Compare with a run: its number, a workspace or a saved result."
        ),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
    *,
    out: Output,
) -> None:
    """Write an HTML report of a run, finished or killed."""
    from neural_mp.reporting.page import comparison_page, page_of, write_page

    record = read_run(workspace, storage, number, model)
    reference = None if against is None else _read_compared_run(against, workspace, storage, model)
    with out.working(f"Writing the page of {record.name or 'the run'}"):
        write_page(
            output, page_of(record) if reference is None else comparison_page(record, reference)
        )
    out.line(f"{_in_words(record)}; page saved to {output}")
    if out.as_json:
        out.document(_run_document(record, output))
    if open_page and not webbrowser.open(output.resolve().as_uri()):
        out.warn(f"no browser is available; open {output} yourself")


def _read_compared_run(
    against: str, workspace: Path | None, storage: str | None, model: str | None
) -> RunRecord:
    if against.isdecimal() and not Path(against).exists():
        return read_run(workspace, storage, int(against), model)
    return read_run(Path(against), None, None, None)


def _in_words(record: RunRecord) -> str:
    name = record.name or "the run"
    if record.ending is None:
        return f"{name} has no end: killed, or still running"
    outcomes = {True: "met its target", False: "did not meet its target", None: "had no target"}
    return f"{name} {outcomes[record.ending.met]}"


def _run_document(record: RunRecord, output: Path) -> dict[str, Any]:
    ending = record.ending
    return {
        "schema": SCHEMA,
        "run": record.name,
        "model": record.setup.model,
        "framework": record.setup.framework,
        "started": record.setup.started,
        "ended": None if ending is None else ending.ended,
        "met": None if ending is None else ending.met,
        "saved_to": str(output),
        "report": None if ending is None else ending.report.to_dict(),
        "trials": [trial_document(trial) for trial in record.trials],
        "plan": None if ending is None else ending.plan.to_dict(),
    }
