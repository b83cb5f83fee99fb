"""A tuning run in a process of its own, which a test can kill; every evaluation leaves a line.

Usage: tuning_script.py WEIGHTS DATA SECONDS_A_BATCH {new,resume} STRATEGY
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pytest
import torch
from nets import deep_net
from quick_runs import measure_briefly

from neural_mp import ExitPolicy, MixedPrecision


class CountingAccuracy:
    """Writes a line when an evaluation begins and one when it ends."""

    def __init__(self, pause: float) -> None:
        self.pause = pause

    def _note(self, word: str) -> None:
        with open("evaluations.txt", "a") as file:  # noqa: PTH123
            file.write(f"{word}\n")

    def reset(self) -> None:
        self.right = self.all = 0
        self._note("begin")

    def update(self, preds, labels) -> None:
        time.sleep(self.pause)
        self.right += int((preds.argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self) -> float:
        self._note("end")
        return self.right / self.all


def main() -> None:
    measure_briefly(pytest.MonkeyPatch())
    weights, data, pause, mode, strategy = sys.argv[1:6]
    model = deep_net()
    model.load_state_dict(torch.load(weights, weights_only=True))
    arrays = np.load(data)
    batches = [
        (arrays["images"][start : start + 100], arrays["labels"][start : start + 100])
        for start in range(0, len(arrays["labels"]), 100)
    ]
    converter = MixedPrecision()
    converter.model = model
    converter.precisions = "int8"
    converter.strategy = strategy
    converter.objective = "modelsize"  # latencies this short are the machine's mood
    converter.metric = CountingAccuracy(float(pause))
    converter.eval_dataloader = batches
    converter.exit_policy = ExitPolicy(max_trials=12)
    converter.resume = mode == "resume"
    result = converter()
    outcome = {
        "met": result.met,
        "trials": len(result.trials),
        "plans": len({trial.plan for trial in result.trials}),
        "int8": result.plan.counts().get("int8", 0),
        "accuracy": result.report.accuracy,
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
