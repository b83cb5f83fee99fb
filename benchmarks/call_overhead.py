"""Cost of one call of a result over the runtime's own call.

Run: `python -m benchmarks.call_overhead [--rounds 2000] [--net tiny|wide] [--framework NAME]`

Two nets in every framework: two dense layers at batch 1, of some microseconds, and a chain of wide
ones, of some milliseconds. `result(x)` is timed beside what it cannot be faster than: the code of
the captured graph on flat inputs (PyTorch), the session (ONNX Runtime), the compiled model
(OpenVINO), the session's compiled callable (TensorFlow). All in turn, one thread; first deciles
over all rounds. An FP32 result of PyTorch is timed beside the user's own module; a net of PyTorch
in another runtime beside that runtime, with conversions for tensors.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

import numpy as np
import torch
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import _build_direct_calls

NETS = {"tiny": (256, 1), "wide": (1024, 6)}


def dense(width: int, depth: int) -> nn.Module:
    """A chain of dense layers with ReLU between them."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10)).eval()


def first_deciles(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of one call of each, in turns of random order."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in random.sample(list(calls.items()), len(calls)):
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    return {name: float(np.quantile(times, 0.1)) for name, times in samples.items()}


def tuned(source: Any, data: Any, precisions: str, runtime: str | None = None) -> Any:
    """The result of a run on a few batches."""
    tuner = MixedPrecision()
    tuner.model, tuner.precisions, tuner.objective = source, precisions, "modelsize"
    tuner.calib_dataloader = [data]
    if runtime is not None:
        tuner.runtime = runtime
    with tempfile.TemporaryDirectory() as folder:
        tuner.workspace, tuner.cache = folder, False
        return tuner()


def pytorch(width: int, depth: int, x: np.ndarray) -> dict[str, dict[str, Callable[[], Any]]]:
    """INT8 beside the code of its graph, FP32 beside the user's module."""
    net, tensor = dense(width, depth), torch.from_numpy(x)
    data = torch.from_numpy(np.repeat(x, 8, 0))
    int8, fp32 = tuned(net, data, "int8"), tuned(net, data, "fp32")
    int8(tensor)
    graph = int8.held.cached_result(_build_direct_calls)._target
    forward, constants = graph._generated_code

    def flat() -> Any:
        with torch.no_grad():
            return forward(constants, tensor)

    def own() -> Any:
        with torch.no_grad():
            return net(tensor)

    return {
        "int8": {
            "runtime": flat,
            "result": lambda: int8(tensor),
            "model": lambda: int8.model(tensor),
        },
        "fp32": {"runtime": own, "result": lambda: fp32(tensor)},
    }


def onnx_file(width: int, depth: int, x: np.ndarray) -> Path:
    """The net as an ONNX file."""
    path = Path(tempfile.mkdtemp()) / "net.onnx"
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        dense(width, depth),
        (torch.from_numpy(np.repeat(x, 2, 0)),),
        path,
        input_names=["x"],
        dynamic_shapes=({0: batch},),
        verbose=False,
        dynamo=True,
    )
    return path


def session_call(model: Any, x: np.ndarray) -> Callable[[], Any]:
    """A call of a session of ONNX Runtime that runs the same graph."""
    session = model.session(model.runs).session
    (port,) = session.get_inputs()
    return lambda: session.run(None, {port.name: x})


def request_call(model: Any, x: np.ndarray) -> Callable[[], Any]:
    """A call of OpenVINO's own object for the same graph."""
    native = openvino_compiled(model)
    return lambda: native(x)


def openvino_compiled(model: Any) -> Any:
    """The compiled model of OpenVINO, with the settings of a result."""
    from neural_mp.adaptors.openvino.runtime import Runner

    return Runner(model.runs)._compiled


def onnxrt(width: int, depth: int, x: np.ndarray) -> dict[str, dict[str, Callable[[], Any]]]:
    """INT8 and FP32 beside the sessions that run them."""
    path, calls = onnx_file(width, depth, x), {}
    for precision in ("int8", "fp32"):
        result = tuned(path, np.repeat(x, 8, 0), precision)
        calls[precision] = {
            "runtime": session_call(result.held, x),
            "result": lambda result=result: result(x),
            "dict": lambda result=result: result({"x": x}),
        }
    return calls


def openvino(width: int, depth: int, x: np.ndarray) -> dict[str, dict[str, Callable[[], Any]]]:
    """INT8 and FP32 beside compiled models."""
    import neural_mp.adaptors.openvino.runtime as runtime

    path, calls = onnx_file(width, depth, x), {}
    for precision in ("int8", "fp32"):
        result = tuned(runtime.get_core().read_model(path), np.repeat(x, 8, 0), precision)
        calls[precision] = {
            "runtime": request_call(result.held, x),
            "result": lambda result=result: result(x),
        }
    return calls


def on_tensors(own: Callable[..., Callable[[], Any]], model: Any, x: torch.Tensor) -> Any:
    """A call of a runtime with a conversion of the input from a tensor and of the result to one."""
    call = own(model, x.numpy())

    def converting() -> torch.Tensor:
        x.detach().numpy()
        return torch.from_numpy(call()[0])

    return converting


def transferred(width: int, depth: int, x: np.ndarray) -> dict[str, dict[str, Callable[[], Any]]]:
    """A net of PyTorch in other runtimes beside the calls of the runtimes, on arrays."""
    net, tensor, calls = dense(width, depth), torch.from_numpy(x), {}
    data = torch.from_numpy(np.repeat(x, 8, 0))
    for runtime, own in (("onnxrt", session_call), ("openvino", request_call)):
        result = tuned(net, data, "int8", runtime)
        result(x)
        calls[f"{runtime} arrays"] = {
            "runtime": own(result.held, x),
            "result": lambda result=result: result(x),
        }
        calls[f"{runtime} tensors"] = {
            "runtime": on_tensors(own, result.held, tensor),
            "result": lambda result=result: result(tensor),
        }
    return calls


def tensorflow(width: int, depth: int, x: np.ndarray) -> dict[str, dict[str, Callable[[], Any]]]:
    """INT8 and FP32 beside the compiled callables of their sessions."""
    import keras

    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    net = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10)])
    calls = {}
    for precision in ("int8", "fp32"):
        result = tuned(net, np.repeat(x, 8, 0), precision)
        result(x)
        runner = result.held.runner
        (call,) = runner._callables.values()
        fed = (x, *runner._held.values())
        calls[precision] = {
            "runtime": lambda call=call, fed=fed: call(*fed),
            "result": lambda result=result: result(x),
        }
    return calls


BUILDERS = {
    "pytorch": pytorch,
    "onnxrt": onnxrt,
    "openvino": openvino,
    "tensorflow": tensorflow,
    "transferred": transferred,
}


def main() -> None:
    """Time all frameworks that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--framework", choices=list(BUILDERS))
    parser.add_argument("--net", choices=list(NETS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':28}{'runtime':>12}{'result':>12}{'over':>10}{'ratio':>8}")
    for framework, build in BUILDERS.items():
        if arguments.framework not in (None, framework):
            continue
        for net, (width, depth) in NETS.items():
            if arguments.net not in (None, net):
                continue
            x = np.random.default_rng(0).random((1 if net == "tiny" else 32, width), np.float32)
            for precision, calls in build(width, depth, x).items():
                rounds = arguments.rounds if net == "tiny" else max(arguments.rounds // 5, 20)
                times = first_deciles(calls, rounds)
                base = times.pop("runtime")
                for name, seconds in times.items():
                    print(
                        f"{framework} {net} {precision} {name:10.6}".ljust(28)
                        + f"{base * 1e6:9.1f} us{seconds * 1e6:9.1f} us"
                        f"{(seconds - base) * 1e6:+7.1f} us{seconds / base:8.2f}"
                    )


if __name__ == "__main__":
    main()
