"""Forked and spawned children of a process that has used a runtime: a result or one error.

    python forks.py FRAMEWORK FOLDER USE...

prints for each use what the child gets: `done`, the name of an error, or `blocked`.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: Seconds after which a child counts as blocked.
_LIMIT_SECONDS = 300
_FRAMEWORKS = ("onnxrt", "openvino", "pytorch", "tensorflow")
_BATCH = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
NAME = "forks"


def _onnx_net(file: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    value = helper.make_tensor_value_info
    weights = np.random.default_rng(1).normal(size=(2, 64, 64)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], "second"),
    ]
    named = [numpy_helper.from_array(w, name) for w, name in zip(weights, "ab", strict=True)]
    ends = (value(name, TensorProto.FLOAT, ["n", 64]) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [next(ends)], [next(ends)], named)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), file)
    return file


def _source(framework: str, folder: Path) -> Any:
    if framework == "pytorch":
        from torch import nn

        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if framework == "tensorflow":
        import keras

        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64)]
        return keras.Sequential([keras.Input((64,)), *layers])
    return _onnx_net(folder / f"net {os.getpid()}.onnx")


def _tune(framework: str, folder: Path) -> Any:
    from neural_mp import MixedPrecision

    return MixedPrecision(
        model=_source(framework, folder),
        runtime="openvino" if framework == "openvino" else "source",
        calib_dataloader=[(_BATCH, None)],
        precisions="int8",
        objective="modelsize",
        cache=False,
        workspace=folder / f"workspace {os.getpid()}",
    )()


def _load(saved: Path) -> None:
    import neural_mp

    outputs = np.asarray(neural_mp.load(saved)(_BATCH))
    assert outputs.shape == (8, 64)
    assert np.isfinite(outputs).all()


def _load_on_one_thread(saved: Path) -> None:
    import torch

    torch.set_num_threads(1)
    _load(saved)


def _in_thread(call: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def _forked(call: Callable[[], Any], *, exits: bool = False) -> str:
    """Return what a forked child gets, with handlers of its exit where `exits`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_LIMIT_SECONDS)
        try:
            call()
            outcome = "done"
        except BaseException as error:  # noqa: BLE001 (nobody sees an error of a child)
            outcome = type(error).__name__
        if exits:
            atexit._run_exitfuncs()
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read() or "blocked"


def _drop_model(saved: Path) -> str:
    """Fork a child that drops the last reference to a model, whose idle threads it lacks."""
    import neural_mp

    models = [neural_mp.load(saved)]
    models[0](_BATCH)
    time.sleep(1.0)  # threads spin before they are idle
    return _forked(models.clear)


def _raise_named(outcome: str) -> None:
    """Raise an error of the name that a grandchild got."""
    if outcome != "done":
        raise type(outcome, (Exception,), {})


def _while_called(result: Any, call: Callable[[], Any]) -> str:
    """Fork while another thread is within the runtime."""
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            result(_BATCH)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return _forked(call)
    finally:
        ends.set()
        thread.join()


def _spawned(framework: str, folder: Path, method: str, *, tunes: bool) -> str:
    context = multiprocessing.get_context(method)
    target: Any = _tune if tunes else _load
    arguments = (framework, folder) if tunes else (folder / "saved",)
    process = context.Process(target=target, args=arguments)  # type: ignore[attr-defined]
    process.start()
    process.join(_LIMIT_SECONDS)
    if process.is_alive():
        process.kill()
        return "blocked"
    return "done" if process.exitcode == 0 else f"exit {process.exitcode}"


_Use = Callable[[str, Path, Any], str]
USES: dict[str, _Use] = {
    "loads": lambda f, d, r: _forked(lambda: _load(d / "saved")),
    "calls": lambda f, d, r: _forked(lambda: r(_BATCH)),
    "tunes": lambda f, d, r: _forked(lambda: _tune(f, d)),
    "saves": lambda f, d, r: _forked(lambda: r.save(d / f"copy {os.getpid()}")),
    "does nothing": lambda f, d, r: _forked(lambda: None),
    "exits": lambda f, d, r: _forked(lambda: None, exits=True),
    "loads and exits": lambda f, d, r: _forked(lambda: _load(d / "saved"), exits=True),
    "loads on one thread": lambda f, d, r: _forked(lambda: _load_on_one_thread(d / "saved")),
    "drops a model": lambda f, d, r: _drop_model(d / "saved"),
    "loads in a thread": lambda f, d, r: _forked(lambda: _in_thread(lambda: _load(d / "saved"))),
    "calls in a thread": lambda f, d, r: _forked(lambda: _in_thread(lambda: r(_BATCH))),
    "forks and loads": lambda f, d, r: _forked(
        lambda: _raise_named(_forked(lambda: _load(d / "saved")))
    ),
    "loads, of a busy parent": lambda f, d, r: _while_called(r, lambda: _load(d / "saved")),
    "calls, of a busy parent": lambda f, d, r: _while_called(r, lambda: r(_BATCH)),
    "is spawned and loads": lambda f, d, r: _spawned(f, d, "spawn", tunes=False),
    "is served and tunes": lambda f, d, r: _spawned(f, d, "forkserver", tunes=True),
}


def _findings(count: int, folder: Path, seed: int) -> Iterator[Any]:
    from attacks.verdicts import REPOSITORY, Finding, Verdict, paths_with

    from neural_mp import errors

    chosen = [(f, use) for f in _FRAMEWORKS for use in USES][:count]
    for framework in _FRAMEWORKS:
        uses = [use for name, use in chosen if name == framework]
        if not uses:
            continue
        (folder / framework).mkdir()
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, framework, str(folder / framework), *uses],
            env={**os.environ, "PYTHONPATH": paths_with(REPOSITORY), "OMP_NUM_THREADS": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        outcomes: dict[str, str] = {}
        for line in lines:
            outcomes |= json.loads(line)
        for use in uses:
            outcome = outcomes.get(use, f"nothing: {done.stderr[-1000:]}")
            verdict = {"done": Verdict.RIGHT, "blocked": Verdict.HANG}.get(outcome)
            if verdict is None:
                ours = hasattr(errors, outcome) and "is " not in use
                verdict = Verdict.REFUSED if ours else Verdict.TRACEBACK
            yield Finding(NAME, f"{framework}: a child {use}", verdict, outcome)


def main() -> None:
    """Print what the children get."""
    framework, folder, uses = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    result = _tune(framework, folder)
    result.save(folder / "saved")
    _load(folder / "saved")
    result(_BATCH)
    for use in uses:
        print(json.dumps({use: USES[use](framework, folder, result)}), flush=True)


if __name__ == "__main__":
    main()
else:
    from attacks.verdicts import Family

    FORKS = Family(NAME, len(_FRAMEWORKS) * len(USES), _findings)
