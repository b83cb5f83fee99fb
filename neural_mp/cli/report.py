"""`neural-mp report` and `neural-mp ui`, and records of runs in workspaces and saved results."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.output import SCHEMA, Output, make_trial_document
from neural_mp.errors import HistoryError

if TYPE_CHECKING:
    from neural_mp.runs.report import RunRecord
from neural_mp.cli.options import TrustOption
from neural_mp.errors import MissingFrameworkError


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
    from neural_mp.reporting.page import build_comparison_page, page_of, write_page

    record = read_run(workspace, storage, number, model)
    reference = None
    if against is not None and against.isdecimal() and not Path(against).exists():
        reference = read_run(workspace, storage, int(against), model)
    elif against is not None:
        reference = read_run(Path(against))
    with out.show_progress(f"Writing the page of {record.name or 'the run'}"):
        write_page(
            output,
            page_of(record) if reference is None else build_comparison_page(record, reference),
        )
    out.saved = output
    out.show_line(f"{_in_words(record)}; page saved to {output}")
    if out.as_json:
        out.show_document(_run_document(record, output))
    if open_page and not webbrowser.open(output.resolve().as_uri()):
        out.show_warning(f"no browser is available; open {output} yourself")


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
        "trials": [make_trial_document(trial) for trial in record.trials],
        "plan": None if ending is None else ending.plan.to_dict(),
    }


def read_run(
    workspace: Path | None,
    storage: str | None = None,
    number: int | None = None,
    model: str | None = None,
) -> RunRecord:
    """Return the record of a run.

    Raises:
        HistoryError: no such run is stored.
    """
    from neural_mp.api.saved_model import RECORD_FILE
    from neural_mp.config.options import DEFAULT_WORKSPACE
    from neural_mp.runs.history import HISTORY_FILE, get_storage_url, read_record
    from neural_mp.runs.record_schema import read_record_file
    from neural_mp.util.validators import file_path, validate_option

    if storage is not None:
        return read_record(get_storage_url(DEFAULT_WORKSPACE, storage), number, model)
    workspace = Path(DEFAULT_WORKSPACE) if workspace is None else workspace
    validate_option("the workspace", file_path, workspace)
    if (workspace / HISTORY_FILE).is_file():
        return read_record(get_storage_url(workspace), number, model)
    if (workspace / RECORD_FILE).is_file():
        if number is not None or model is not None:
            raise HistoryError(
                f"--run and --model require a workspace, got the saved result {str(workspace)!r}; "
                f"remove them"
            )
        return read_record_file(workspace / RECORD_FILE)
    what = "contains no runs" if workspace.is_dir() else "is not a folder"
    raise HistoryError(
        f"{str(workspace)!r} {what}; give the workspace of a run (default: neural_mp_workspace) or "
        f"the folder of a saved result"
    )


_MAX_PORT = 65535


def ui(
    workspace: Annotated[
        Path | None, typer.Argument(help="Workspace of runs; default: neural_mp_workspace.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=_MAX_PORT, help="Port on this machine; 0 for a free one.")
    ] = 8400,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
    trust: TrustOption = None,
    *,
    out: Output,
) -> None:
    """Serve the runs of a workspace to a browser on this machine."""
    from neural_mp.config import trust_of
    from neural_mp.config.options import DEFAULT_WORKSPACE
    from neural_mp.ui.workspace import Replays, Workspace
    from neural_mp.util.optional_packages import install_command

    try:
        from neural_mp.ui.server import Site, bind_port, serve
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn"):
            raise
        raise MissingFrameworkError(
            f"the browser view requires {package}: {install_command('ui')}"
        ) from error
    runs = Workspace(Path(DEFAULT_WORKSPACE) if workspace is None else workspace)
    replays = Replays(runs.folder, trust_of(trust or ()))
    listener = bind_port(port)
    site = Site(runs, replays, listener.getsockname()[1])
    out.show_line(f"{site.url}\nopen this address in a browser on this machine; Ctrl-C ends")
    if out.as_json:
        out.show_document({"url": site.url, "workspace": str(runs.folder)})
    if open_page and not webbrowser.open(site.url):
        out.show_warning("no browser is available; open the address yourself")
    serve(site, listener)
