"""Runs of one framework, and what is different after each of them.

    python tests/api/surroundings_run.py pytorch FOLDER

Prints a JSON object: what was done → name → what it was and what it became.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse  # noqa: F401 (it sets a filter of warnings when it is imported)
from quick_runs import give_nominal_times
from surroundings import differences, snapshot

import neural_mp
from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.testing import Accuracy


class OwnError(Exception):
    """A user's."""


def batches(count: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of (images, labels)."""
    draw = np.random.default_rng(0)
    return [(draw.random((8, 1, 8, 8), np.float32), draw.integers(0, 10, 8)) for _ in range(count)]


def _raise(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


class Acts:
    """A metric that acts in the second pass."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.passes, self.act = 0, act

    def reset(self) -> None:
        self.passes += 1

    def update(self, preds: Any, labels: Any) -> None:
        if self.passes > 1:
            self.act()

    def result(self) -> float:
        return 1.0


def converter(model: Any, folder: Path, **options: Any) -> MixedPrecision:
    tuner = MixedPrecision(precisions="int8,bf16", workspace=folder / "runs", metric=Accuracy())
    tuner.model, tuner.eval_dataloader = model, batches()
    tuner.exit_policy = ExitPolicy(max_trials=2)
    tuner.accuracy_criterion = {
        "absolute": 1.0,
        "any_tolerance": True,
        "any_baseline": True,
    }
    tuner.objective = "modelsize"  # two of the runs measure latencies
    for name, value in options.items():
        setattr(tuner, name, value)
    return tuner


def doings(model: Any, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is done, one after the other."""

    def succeed() -> None:
        converter(model, folder, objective="performance")()

    def fail() -> None:
        try:
            converter(model, folder, metric=Acts(_raise(OwnError("mine"))))()
        except OwnError:
            pass
        else:
            raise AssertionError("nothing was raised")

    def interrupt() -> None:
        converter(model, folder, metric=Acts(_raise(KeyboardInterrupt())))()

    def raise_in_calibration() -> None:
        def calibration() -> Iterator[Any]:
            yield from batches(1)
            raise OwnError("mine")

        try:
            converter(model, folder, calib_dataloader=calibration)()
        except OwnError:
            return
        raise AssertionError("nothing was raised")

    def interrupt_calibration() -> None:
        def calibration() -> Iterator[Any]:
            yield from batches(1)
            raise KeyboardInterrupt

        try:
            converter(model, folder, calib_dataloader=calibration)()
        except KeyboardInterrupt:
            return
        raise AssertionError("nothing was raised")

    def convert_unchecked() -> None:
        tuner = converter(model, folder, metric=None, eval_dataloader=None)
        tuner.calib_dataloader = batches()
        tuner()

    def module_by_module() -> None:
        if hasattr(model, "named_modules"):
            converter(model, folder, capture="modules")()

    def refuse() -> None:
        try:
            converter(model, folder, eval_dataloader=[1, 2])()
        except neural_mp.NeuralMPError:
            return
        raise AssertionError("nothing was raised")

    def side_by_side() -> None:
        converter(model, folder, workers=2, strategy="random")()

    def save_and_load() -> None:
        result = converter(model, folder)()
        result.save(folder / "saved")
        loaded = neural_mp.load(folder / "saved")
        loaded(batches()[0][0])

    def compare() -> None:
        neural_mp.compare(model, converter(model, folder)(), batches())

    def sensitivity() -> None:
        converter(model, folder, objective="performance").sensitivity()

    def benchmark() -> None:
        from neural_mp.api.named_models import benchmark_models

        benchmark_models([str(folder / "saved")], warmup=1, iterations=2)

    def inspect() -> None:
        from neural_mp.api.loading import load_source

        load_source(model, None, None, example=batches()[0][0]).profile_ops(batches()[0][0])

    # What starts the workers does not know the framework, which each of them imports anew.
    workers = () if hasattr(model, "get_config") or hasattr(model, "modules") else (side_by_side,)
    for function in (
        succeed,
        fail,
        interrupt,
        raise_in_calibration,
        interrupt_calibration,
        convert_unchecked,
        module_by_module,
        refuse,
        *workers,
        save_and_load,
        compare,
        sensitivity,
        benchmark,
        inspect,
    ):
        yield function.__name__, function


def model_of(framework: str, folder: Path) -> Any:
    if framework == "pytorch":
        import torch
        from torch import nn

        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        net.train()  # a user may forget that
        net(torch.zeros(2, 1, 8, 8)).sum().backward()
        torch.optim.Adam(net.parameters()).step()  # imports what training imports
        net[1].bias.requires_grad_(False)
        net[1].register_forward_hook(lambda *_: None)
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("high")
        return net
    if framework == "tensorflow":
        import keras
        import tensorflow as tf
        from keras import layers

        tf.random.set_seed(7)
        net = keras.Sequential([keras.Input((1, 8, 8)), layers.Flatten(), layers.Dense(10)])
        net.compile("adam", "mse")
        net.layers[-1].trainable = False
        return net
    import onnx
    import onnxruntime  # noqa: F401
    from onnx_nets import graph, op

    weights = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
    nodes = [op("Flatten", "x", "flat"), op("Gemm", "flat w", "y")]
    model = graph(nodes, {"x": ["batch", 1, 8, 8]}, ["y"], {"w": weights})
    path = folder / "model" / "net.onnx"
    path.parent.mkdir()
    onnx.save(model, path)
    return str(path)


def main() -> None:
    framework, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir(folder)
    scratch = folder / "scratch"  # nobody else writes there
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    model = model_of(framework, folder)
    np.seterr(divide="raise")
    np.set_printoptions(precision=3)
    give_nominal_times(pytest.MonkeyPatch())
    changes = {}
    for name, do in doings(model, folder):
        previous = snapshot(model=model)
        do()
        changes[name] = differences(previous, snapshot(model=model))
    json.dump(changes, sys.stdout)


if __name__ == "__main__":
    main()
