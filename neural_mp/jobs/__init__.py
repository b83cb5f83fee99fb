"""Many tuning files, each a job in a process of its own."""

from neural_mp.jobs.driver import JobResults, tune_many

__all__ = ["JobResults", "tune_many"]
