"""How much faster an evaluation is that workers share, and whether it finds the same.

    OMP_NUM_THREADS=1 python -m benchmarks.shards [--seconds 60] [--workers 2]

Plans are tried one after the other, first in this process, then by workers of one thread
each. Nothing but accuracy is measured. The first shared trial holds the start of the workers.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision, common
from neural_mp.core.trial import Trial
from neural_mp.util.text import format_count

BATCH = 50


class Pictures:
    """As many samples as are asked for, of a few that are kept; labels are what FP32 says."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, count: int) -> None:
        self.images, self.labels, self.count = images, labels, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        position = index % len(self.labels)
        return self.images[position], self.labels[position]


def net() -> nn.Module:
    """Six convolutions; [N, 3, 32, 32] → 10 logits."""
    torch.manual_seed(0)
    sizes = (3, 32, 32, 64, 64, 128, 128)
    layers: list[nn.Module] = []
    for index, (in_channels, out_channels) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Conv2d(in_channels, out_channels, 3, 1 + index % 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10)).eval()


def pictures(model: nn.Module, seconds: float) -> Pictures:
    """Data over which FP32 takes so many seconds, as far as one batch tells."""
    images = np.random.default_rng(0).normal(size=(10 * BATCH, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        labels = model(torch.from_numpy(images)).argmax(1).numpy()
        batch, batch_seconds = torch.from_numpy(images[:BATCH]), float("inf")
        for _ in range(10):
            started = time.perf_counter()
            model(batch)
            batch_seconds = min(batch_seconds, time.perf_counter() - started)
    return Pictures(images, labels, BATCH * max(10, round(seconds / batch_seconds)))


def tried(model: nn.Module, data: Pictures, workers: int, limit: int) -> tuple[Trial, ...]:
    """The trials of plans that all miss, since nothing may be lost."""
    converter = MixedPrecision(strategy="basic", objective="modelsize", precisions="int8")
    converter.model, converter.metric = model, "accuracy"
    converter.eval_dataloader = common.DataLoader(data, batch_size=BATCH)
    converter.accuracy_criterion = AccuracyCriterion(1e-9)
    converter.exit_policy = ExitPolicy(max_trials=limit)
    converter.early_stopping = False
    converter.workers = workers
    with tempfile.TemporaryDirectory() as folder:
        converter.workspace = folder
        return converter().trials


def main() -> None:
    """Time both, and compare what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of one evaluation in FP32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trials", type=int, default=3, help="at least 2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = net()
    data = pictures(model, options.seconds)
    print(f"{len(data) // BATCH} batches of {BATCH}; load of the machine {os.getloadavg()[0]:.1f}")
    by_workers = {
        count: tried(model, data, count, options.trials) for count in (1, options.workers)
    }
    for count, trials in by_workers.items():
        seconds = ", ".join(f"{trial.seconds:.1f} s" for trial in trials)
        print(f"{format_count(count, 'worker'):>10}: trials of {seconds}")
    single, shared = by_workers[1], by_workers[options.workers]
    first = single[0].seconds / shared[0].seconds
    rest = sum(t.seconds for t in single[1:]) / sum(t.seconds for t in shared[1:])
    same = [(t.plan, t.accuracy) for t in single] == [(t.plan, t.accuracy) for t in shared]
    print(f"{first:.2f} times as fast with the start, {rest:.2f} after that")
    print(f"the same plans and accuracies: {same}")


if __name__ == "__main__":
    main()
