"""What `tune-many` itself takes where very many jobs are finished already.

python -m benchmarks.jobs --jobs 10000
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from neural_mp import tune_many
from neural_mp.jobs.driver import compute_job_digest
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus

JOB = "model: {name: %s}\ntuning: {random_seed: %d}\n"
BYTES = 10_000_000


def main() -> None:
    """Make finished jobs of one model, and start them again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    count = parser.parse_args().jobs
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, files = root / "model.onnx", root / "jobs"
        model.write_bytes(bytes(BYTES))
        files.mkdir()
        for number in range(count):
            file = files / f"job{number:05d}.yaml"
            file.write_text(JOB % (model, number))
            digest = compute_job_digest(file)
            name = f"{file.stem}-{digest[:12]}"
            job = JobOutcome(name, str(file), digest, JobStatus.MET, accuracy=0.97, seconds=60.0)
            job.write(root / "results" / name)
        started = time.perf_counter()
        results = tune_many(files, output=root / "results")
        seconds = time.perf_counter() - started
        assert all(job.known for job in results.outcomes)
        size = results.page.stat().st_size
        print(f"{count} finished jobs: {seconds:.1f} s, page of {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
