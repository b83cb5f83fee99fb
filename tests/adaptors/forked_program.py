"""Fork after a conversion, and print what each child gets, for `test_forks.py`.

python forked_program.py FRAMEWORK FOLDER
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import neural_mp
from neural_mp import MixedPrecision

#: Seconds after which a child counts as blocked.
LIMIT_SECONDS = 60
BATCH = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


def build_source(framework: str) -> Any:
    if framework == "tensorflow":
        import keras

        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64)]
        return keras.Sequential([keras.Input((64,)), *layers])
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    if framework == "pytorch":
        return net
    file = sys.argv[2] + "/net.onnx"
    torch.onnx.export(net, (torch.from_numpy(BATCH),), file, verbose=False)
    return file


def tune(framework: str, folder: Path) -> Any:
    return MixedPrecision(
        model=build_source(framework),
        runtime="openvino" if framework == "openvino" else "source",
        calib_dataloader=[(BATCH, None)],
        precisions="int8",
        objective="modelsize",
        cache=False,
        workspace=folder,
    )()


def run_in_child(function: Callable[[], object]) -> str:
    """Return `done`, the name of the error, or `blocked`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_SECONDS)
        try:
            function()
            outcome = "done"
        except BaseException as error:  # noqa: BLE001 - nobody sees an error of a child
            outcome = type(error).__name__
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read() or "blocked"


def load_on_one_thread(saved: Path) -> None:
    import torch

    torch.set_num_threads(1)
    neural_mp.load(saved)(BATCH)


def main() -> None:
    framework, folder = sys.argv[1], Path(sys.argv[2])
    result = tune(framework, folder / "workspace")
    saved = folder / "saved"
    result.save(saved)
    neural_mp.load(saved)(BATCH)
    outcomes = {
        "load": run_in_child(lambda: neural_mp.load(saved)(BATCH)),
        "tune": run_in_child(lambda: tune(framework, folder / "other")),
        "call": run_in_child(lambda: result(BATCH)),
        "one thread": run_in_child(lambda: load_on_one_thread(saved)),
    }
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
