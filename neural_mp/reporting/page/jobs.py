"""The page of many jobs: one table that leads to the page of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from neural_mp.reporting import formatting
from neural_mp.reporting.jobs import figures, totals
from neural_mp.reporting.page.charts import card, scrolling
from neural_mp.reporting.page.document import head
from neural_mp.reporting.page.summary import tile
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus
from neural_mp.util.html import Child, Element, element, markup, table
from neural_mp.util.text import counted


def jobs_page(outcomes: Sequence[JobOutcome], links: Mapping[str, str]) -> str:
    """An HTML document that shows what came of jobs; it loads nothing and runs no script.

    Args:
        outcomes: in the order in which they are shown.
        links: job → where its page is, seen from this page.
    """
    failed = [job for job in outcomes if not job.status.finished]
    body = element(
        "body",
        element(
            "main",
            element(
                "header",
                element(
                    "div",
                    element("h1", "Tuning jobs"),
                    element("p", totals(outcomes), class_="sub"),
                ),
            ),
            _tiles(outcomes),
            _failures(failed, links) if failed else None,
            element("div", _table(outcomes, links), class_="one"),
            element("footer", "Written by neural-mp. This file is complete: it loads nothing."),
        ),
        class_="nmp",
    )
    title = "Tuning jobs: neural-mp report"
    return "<!doctype html>\n" + markup(element("html", head(title), body, lang="en"))


def _tiles(outcomes: Sequence[JobOutcome]) -> Element:
    finished = [job for job in outcomes if job.status.finished]
    missed = [job for job in finished if job.status is JobStatus.MISSED]
    failed = len(outcomes) - len(finished)
    speeds = sorted(job.speedup for job in finished if job.speedup)
    sizes = sum(job.size for job in finished), sum(job.baseline_size for job in finished)
    verdict = "All finished" if not failed else f"{failed} without result"
    return element(
        "section",
        tile(
            "Verdict",
            verdict,
            f"{len(finished)} of {counted(len(outcomes), 'job')} finished",
            kind=f"verdict {'bad' if failed else 'open' if missed else 'good'}",
        ),
        tile("Target met", str(sum(job.status is JobStatus.MET for job in finished)), "jobs"),
        tile("Target missed", str(len(missed)), "their results are the FP32 models"),
        tile(
            "Speed",
            formatting.times(speeds[len(speeds) // 2] if speeds else None),
            f"as fast as FP32, the middle of {counted(len(speeds), 'job')}",
        ),
        tile("Weights", formatting.size(sizes[0]), f"FP32 {formatting.size(sizes[1])}"),
        class_="tiles",
        aria_label="Result",
    )


def _failures(failed: Sequence[JobOutcome], links: Mapping[str, str]) -> Element:
    rows = [[_link(job, links), job.reason] for job in failed]
    return card(
        "Without a result",
        "The same command tries them again; the link leads to what was logged.",
        scrolling(table(["job", "reason"], rows, class_="left"), "Jobs without a result"),
    )


def _table(outcomes: Sequence[JobOutcome], links: Mapping[str, str]) -> Element:
    headings = ("job", "result", "accuracy", "FP32", "speed", "size", "time", "file")
    rows = [
        [_link(job, links), str(job.status), *figures(job), element("code", job.file)]
        for job in outcomes
    ]
    return card(
        "Jobs",
        "Speed and size are beside FP32. Every finished job has a page of its own.",
        scrolling(table(headings, rows), "Jobs"),
    )


def _link(job: JobOutcome, links: Mapping[str, str]) -> Child:
    return element("a", job.name, href=links[job.name]) if job.name in links else job.name
