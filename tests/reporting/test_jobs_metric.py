"""The table and the page of many jobs name the metric of the jobs."""

import io

from rich.console import Console

from neural_mp.reporting.jobs import build_jobs_table, describe_outcome
from neural_mp.reporting.page.document import build_jobs_page
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus


def job(name, metric, value):
    outcome = JobOutcome(name, f"{name}.yaml", "0", JobStatus.MET, metric=metric)
    return JobOutcome(**{**vars(outcome), "accuracy": value, "baseline_accuracy": value})


def console_text(jobs):
    written = io.StringIO()
    Console(file=written, width=120).print(build_jobs_table(jobs))
    return written.getvalue()


def test_jobs_with_one_metric_have_its_name_as_the_heading():
    jobs = [job("a", "RMSE", 49.9), job("b", "RMSE", 51.5)]
    for shown in (build_jobs_page(jobs, {}), console_text(jobs)):
        assert "RMSE" in shown
        assert "accuracy" not in shown
    assert "RMSE 49.9" in describe_outcome(jobs[0])


def test_jobs_with_several_metrics_name_each_beside_its_value():
    jobs = [job("a", "RMSE", 49.9), job("b", "topk", 0.75)]
    for shown in (build_jobs_page(jobs, {}), console_text(jobs)):
        assert "RMSE 49.9" in shown
        assert "topk 0.75" in shown
        assert "accuracy" not in shown
