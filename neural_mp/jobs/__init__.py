"""Tuning of many models: one job and one process per tuning file."""

from neural_mp.jobs.driver import JobResults, tune_many

__all__ = ["JobResults", "tune_many"]
