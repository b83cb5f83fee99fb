"""CPU seconds of tuning ResNet-50 twice, the second time with another tolerance.

    OMP_NUM_THREADS=1 python -m benchmarks.reuse [--images 64]

Every run is a process of its own. The second one finds in the workspace what the first measured;
a third one measures all of it again, with the second's tolerance.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import run_child
from benchmarks.nets.deployed_nets import resnet50
from neural_mp import AccuracyCriterion, MixedPrecision

#: Name → tolerance and whether earlier runs are looked at.
RUNS = {
    "first": (0.3, True),
    "again, another tolerance": (0.2, True),
    "the same, cache off": (0.2, False),
}


def main() -> None:
    """Run all three, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--run", choices=RUNS, help="in a child: what to run")
    parser.add_argument("--workspace", default="")
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.images, options.workspace)))
        return
    with tempfile.TemporaryDirectory() as folder:
        common = ("--images", options.images, "--workspace", folder)
        rows = [run_child("reuse", "--run", name, *common) for name in RUNS]
    table = Table("run", "CPU s", "share", "evaluations", "trials", "not measured again")
    for name, row in zip(RUNS, rows, strict=True):
        share = row["seconds"] / rows[0]["seconds"]
        reused = ", ".join(row["reused"])
        counts = str(row["evaluations"]), str(row["trials"])
        table.add_row(name, f"{row['seconds']:.1f}", f"{share:.0%}", *counts, reused)
    Console().print(table)


def run(name: str, images: int, workspace: str) -> dict[str, Any]:
    """Tune once; what the classes are is what FP32 says."""
    tolerance, cache = RUNS[name]
    net = resnet50()
    pixels = np.random.default_rng(0).normal(size=(images, 3, 224, 224)).astype(np.float32)
    with torch.no_grad():
        labels = [int(net(torch.from_numpy(pixels[i : i + 1])).argmax()) for i in range(images)]
    batches = [(pixels[i : i + 1], np.array(labels[i : i + 1])) for i in range(images)]
    calibration = [(pixels[i : i + 4], np.array(labels[i : i + 4])) for i in range(0, 16, 4)]
    started = time.process_time()
    result = MixedPrecision(
        model=net,
        metric="accuracy",
        eval_dataloader=batches,
        calib_dataloader=calibration,
        sampling_size=16,
        precisions="int8",
        accuracy_criterion=AccuracyCriterion(tolerance),
        workspace=workspace,
        cache=cache,
    )()
    return {
        "seconds": time.process_time() - started,
        "reused": result.report.cache_hits,
        "evaluations": result.report.evaluations,
        "trials": len(result.trials),
    }


if __name__ == "__main__":
    main()
