"""`neural-mp tune-many`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.errors import ExitCode, epilog
from neural_mp.cli.options import TrustOption
from neural_mp.cli.output import Output

if TYPE_CHECKING:
    from neural_mp.jobs import JobResults

EPILOG = epilog("tune-many jobs/*.yaml --workers 2 --output results")


def tune_many(
    files: Annotated[
        list[str], typer.Argument(help="Tuning YAMLs or folders of tuning YAMLs; one job each.")
    ],
    workers: Annotated[
        str,
        typer.Option(help="Workers: a number of processes, ray or ray:HOST:PORT."),
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
    from neural_mp.reporting.jobs import JobsListener, LiveJobs, jobs_table

    out.kept = "finished jobs are kept; continue with the same command"
    listener = JobsListener() if out.quiet else LiveJobs()
    results = jobs.tune_many(
        files, workers=workers, output=output, listener=listener, trust=trust or ()
    )
    out.show(jobs_table(results.outcomes))
    out.line(f"page saved to {results.page}")
    if out.as_json:
        out.document(_jobs_document(results))
    if results.failed or results.missed:
        raise typer.Exit(ExitCode.JOB_FAILED)


def _jobs_document(results: JobResults) -> dict[str, Any]:
    return {"jobs": [job.to_dict() for job in results.outcomes], "page": results.page}
