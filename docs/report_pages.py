"""Three real runs and their pages, for the documentation and for a look at what a page shows.

    python -m docs.report_pages [--net residual3] [--out build/pages]

A PyTorch net that meets its target, an ONNX file that misses it, and a Keras model whose run is
killed in its middle: each a run of its own process, each page made of its workspace alone. Where
Chromium is installed, a picture of every page lies beside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

#: Small beside the data, so that ops can be timed one by one while FP32 is evaluated once.
BATCH = 32
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Width of the pictures, and what is more than any page is high, in pixels.
WIDTH, HEIGHT = 1400, 5200


@dataclass(frozen=True)
class Run:
    """A run: what it tunes with, and after how many trials it is killed."""

    framework: str
    options: dict[str, Any]
    killed_after: int | None = None


RUNS = (
    Run("pytorch", {"strategy": "tpe", "exit_policy": {"max_trials": 24}}),
    Run(
        "onnx",
        {"strategy": "random", "exit_policy": {"max_trials": 6}, "accuracy_criterion": 0.0},
    ),
    Run("tensorflow", {"strategy": "tpe", "exit_policy": {"max_trials": 24}}, killed_after=9),
)


def tune(run: Run, net: str, workspace: Path) -> None:
    """Tune a net in this process, which a run with a limit kills."""
    from benchmarks.measurement.search_data import Digits
    from benchmarks.nets.search_nets import net_in
    from benchmarks.real.case import Accuracy
    from neural_mp import MixedPrecision, common
    from neural_mp.tuning.listener import Listener

    class Killer(Listener):
        seen = 0

        def trial(self, *_: object) -> None:
            self.seen += 1
            if self.seen == run.killed_after:
                os.kill(os.getpid(), signal.SIGKILL)

    def loader(split: str) -> common.DataLoader:
        return common.DataLoader(Digits(split, run.framework == "tensorflow"), batch_size=BATCH)

    MixedPrecision(
        model=net_in(run.framework, net),
        metric=Accuracy(),
        eval_dataloader=loader("test"),
        calib_dataloader=loader("train"),
        workspace=workspace,
        listener=Killer(),
        random_seed=3,
        **run.options,
    )()


def picture(page: Path) -> None:
    """Write a picture of a page beside it, where Chromium is installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("there is no Chromium here; no pictures")
        return
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    size = f"--window-size={WIDTH},{HEIGHT}"
    target = f"--screenshot={page.with_suffix('.png').resolve()}"
    # The script draws when the page is there; the budget gives it time for that.
    subprocess.run(
        [browser, *options, size, "--virtual-time-budget=3000", target, page.resolve().as_uri()],
        stderr=subprocess.DEVNULL,
        check=True,
    )


def main() -> None:
    """Run all, each in a process of its own, and write their pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", default="residual3")
    parser.add_argument("--out", type=Path, default=Path("build/pages"))
    parser.add_argument("--only", choices=[run.framework for run in RUNS], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.only:
        (run,) = (run for run in RUNS if run.framework == chosen.only)
        tune(run, chosen.net, chosen.out / run.framework)
        return
    for run in RUNS:
        workspace = chosen.out / run.framework
        shutil.rmtree(workspace, ignore_errors=True)
        arguments = ["--net", chosen.net, "--out", str(chosen.out), "--only", run.framework]
        command = [sys.executable, "-m", "docs.report_pages", *arguments]
        ended = subprocess.run(command, check=False).returncode
        expected = -signal.SIGKILL if run.killed_after else 0
        if ended != expected:
            raise SystemExit(f"the run of {run.framework} ended with {ended}")
        page = chosen.out / f"{run.framework}.html"
        report = (sys.executable, "-m", "neural_mp.cli.entry_point", "report")
        subprocess.run([*report, str(workspace), "--output", str(page)], check=True)
        picture(page)


if __name__ == "__main__":
    main()
