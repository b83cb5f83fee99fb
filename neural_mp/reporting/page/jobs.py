"""HTML page of many jobs: a table with links to their pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from neural_mp.reporting import formatting
from neural_mp.reporting.jobs import figure_headings, figures, has_several_metrics, totals
from neural_mp.reporting.page.charts import card, scrolling
from neural_mp.reporting.page.document import header, html_page
from neural_mp.reporting.page.summary import tile
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus
from neural_mp.util.html import Child, Element, element, table
from neural_mp.util.text import counted

_UNFINISHED = "not finished: the process of the job runs, or was killed"


def jobs_page(outcomes: Sequence[JobOutcome], links: Mapping[str, str]) -> str:
    """Return an HTML page of job outcomes; `links` maps a job to its page."""
    failed = [job for job in outcomes if not job.status.finished]
    content = (
        header("Tuning jobs", totals(outcomes)),
        _tiles_section(outcomes),
        _failures_card(failed, links) if failed else None,
        element("div", _jobs_card(outcomes, links), class_="one"),
    )
    return html_page("Tuning jobs: neural-mp report", content)


def _tiles_section(outcomes: Sequence[JobOutcome]) -> Element:
    finished = [job for job in outcomes if job.status.finished]
    missed = [job for job in finished if job.status is JobStatus.MISSED]
    failed = len(outcomes) - len(finished)
    speeds = sorted(job.speedup for job in finished if job.speedup)
    sizes = sum(job.size for job in finished), sum(job.baseline_size for job in finished)
    verdict = "All finished" if not failed else f"{failed} without a result"
    return element(
        "section",
        tile(
            "Verdict",
            verdict,
            f"{len(finished)} of {counted(len(outcomes), 'job')} finished",
            kind=f"verdict {'bad' if failed else 'open' if missed else 'good'}",
        ),
        tile("Target met", str(sum(job.status is JobStatus.MET for job in finished)), "jobs"),
        tile("Target missed", str(len(missed)), "jobs; the result is the model as given"),
        tile(
            "Speed",
            formatting.times(speeds[len(speeds) // 2] if speeds else None),
            f"as fast as the baseline, median of {counted(len(speeds), 'job')}",
        ),
        tile("Weights", formatting.size(sizes[0]), f"baseline {formatting.size(sizes[1])}"),
        class_="tiles",
        aria_label="Result",
    )


def _failures_card(failed: Sequence[JobOutcome], links: Mapping[str, str]) -> Element:
    rows = [[_job_link(job, links), job.reason or _UNFINISHED] for job in failed]
    return card(
        "Jobs without a result",
        "Run the same command again to repeat these jobs. Each link opens the log of a job.",
        scrolling(
            table(["job", "reason"], rows, class_="left names-first"), "Jobs without a result"
        ),
    )


def _jobs_card(outcomes: Sequence[JobOutcome], links: Mapping[str, str]) -> Element:
    named = has_several_metrics(outcomes)
    headings = ("job", "result", *figure_headings(outcomes), "file")
    rows = [
        [_job_link(job, links), str(job.status), *figures(job, named), element("code", job.file)]
        for job in outcomes
    ]
    return card(
        "Jobs",
        "Speed and size are compared with the baseline, the model as given. Each link opens the "
        "report of a finished job.",
        scrolling(table(headings, rows, class_="names-first"), "Jobs"),
    )


def _job_link(job: JobOutcome, links: Mapping[str, str]) -> Child:
    return element("a", job.name, href=links[job.name]) if job.name in links else job.name
