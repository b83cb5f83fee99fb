"""The stages of `runtimes.py`, each in a process of its own; they return what is to be printed.

Ours without a metric is the fastest plan in PyTorch, torch.compile, ONNX Runtime and TensorFlow.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measurement.clock import Clock, import_before_calls, peak_memory
from benchmarks.nets.case import Arrays
from benchmarks.nets.runtime_nets import (
    AT_ONCE,
    CALIBRATED,
    CALIBRATION,
    JUDGED,
    TIMED,
    case_of,
    noise,
    reference,
    write_program,
    write_source,
)
from benchmarks.peers.runtime_lite import as_keras_takes, keras_net, lite_call, write_lite
from neural_mp import AccuracyCriterion, MixedPrecision, load
from neural_mp.adaptors.openvino.runtime import choose_precision_hint, get_core
from neural_mp.api.runtimes import RuntimeChoice
from neural_mp.tuning.measurement.objectives import Measurement

Call = Callable[[Arrays], np.ndarray]
EAGER, COMPILED = "ours, PyTorch", "ours, torch.compile"
ONNX, KERAS = "ours, ONNX Runtime", "ours, TensorFlow"
KERAS_FP32 = "TensorFlow FP32 of the Keras model"
#: Runtime → the way in the tables.
_RUNTIMES = {"pytorch": EAGER, "onnxruntime": ONNX, "tensorflow": KERAS}
Run = Callable[[], Any]
#: Ways to run a model → their names in the tables.
TORCH, ORT, OPENVINO = "PyTorch FP32", "ONNX Runtime FP32", "OpenVINO FP32"
OURS, PLAIN = "ours, runtime=auto", "ours, by plain OpenVINO"
NNCF, NNCF_F32 = "NNCF, OpenVINO's own hint", "NNCF, hint f32"
STATIC, PT2E = "quantize_static", "torchao PT2E + inductor"
TFLITE = "TFLite INT8 of the Keras model"
#: Ways of ours without a metric, and the FP32 that each is compared with.
OWN = {EAGER: TORCH, COMPILED: TORCH, ONNX: ORT, KERAS: KERAS_FP32}
#: Settings of OpenVINO without BF16, which its own hint takes where the machine has kernels.
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
FLOATS, PEERS = (TORCH, ORT, OPENVINO), (NNCF, NNCF_F32, STATIC, PT2E, TFLITE)


def own(name: str, folder: Path, size: str, runtime: str, *settings: str) -> dict[str, Any]:
    """Convert a model for a runtime without a metric, and save the result.

    `settings` are further ones, such as `precisions=bf16`.
    """
    case, keras = case_of(name), runtime == "tensorflow"
    batches = [_taken(inputs, keras) for inputs in case.cut(CALIBRATION, CALIBRATED, int(size))]
    result = MixedPrecision(
        model=_source(name, folder, runtime),
        runtime="source",
        calib_dataloader=batches,
        sampling_size=CALIBRATION,
        workspace=folder / f"workspace-{runtime}{size}",
        cache=False,
        **dict(setting.split("=") for setting in settings),
    )()
    target = _place(folder, runtime, int(size))
    shutil.rmtree(target, ignore_errors=True)
    result.save(target)
    return {"plan": {str(precision): count for precision, count in result.plan.counts().items()}}


def own_calls(folder: Path, size: int) -> dict[str, Call]:
    """Return way → the call of a result, for those that were saved."""
    calls: dict[str, Call] = {}
    for runtime, label in _RUNTIMES.items():
        path = _place(folder, runtime, size)
        if not path.exists():
            continue
        result = load(path)
        calls[label] = _called(result, keras=runtime == "tensorflow")
        if runtime == "pytorch" and shutil.which("g++"):
            calls[COMPILED] = module_call(result.compiled())
    if KERAS in calls and (folder / "keras").exists():
        calls[KERAS_FP32] = _keras_fp32(folder / "keras")
    return calls


def own_noise(
    name: str, calls: dict[str, Call], expected: np.ndarray, size: int
) -> dict[str, float]:
    """Return way → noise; that of Keras models, with weights of their own, beside their FP32."""
    case = case_of(name)
    results = {
        label: np.concatenate([call(inputs) for inputs in case.cut(case.judged, JUDGED, size)])
        for label, call in calls.items()
    }
    keras = results.get(KERAS_FP32, expected)
    return {
        label: noise(keras if label in (KERAS, KERAS_FP32) else expected, outputs)
        for label, outputs in results.items()
    }


def _source(name: str, folder: Path, runtime: str) -> Any:
    if runtime == "pytorch":
        return case_of(name).build()
    if runtime == "onnxruntime":
        return folder / "fp32.onnx"
    net = keras_net(name)
    net.export(folder / "keras", verbose=False)  # the FP32 to compare with
    return net


def _place(folder: Path, runtime: str, size: int) -> Path:
    return folder / f"own-{runtime}{size}"


def _taken(inputs: Arrays, keras: bool) -> Any:
    if keras:
        return as_keras_takes(inputs)
    return inputs[0] if len(inputs) == 1 else inputs


def _called(result: Any, *, keras: bool) -> Call:
    if keras:
        return lambda inputs: np.asarray(result(as_keras_takes(inputs)))
    return lambda inputs: np.asarray(result(*inputs))


def module_call(module: Any) -> Call:
    """Return the call of a torch module, for its first result."""

    def call(inputs: Arrays) -> np.ndarray:
        with torch.inference_mode():
            outputs = module(*map(torch.from_numpy, inputs))
        return np.asarray(outputs[0] if isinstance(outputs, tuple | list) else outputs)

    return call


def _keras_fp32(path: Path) -> Call:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    return lambda inputs: np.asarray(loaded.serve(as_keras_takes(inputs)))


def make(name: str, folder: Path) -> dict[str, Any]:
    """Write what the tools start from."""
    write_source(name, folder)
    return {}


def export(name: str, folder: Path, size: str) -> dict[str, Any]:
    """Write the exported program of a batch size."""
    write_program(name, folder, int(size))
    return {}


def tune(name: str, folder: Path, size: str, most_noise: str, clock_name: str) -> dict[str, Any]:
    """Tune the torch module with `runtime=auto`: the fastest at most as noisy as NNCF."""
    if clock_name == "cpu":
        Measurement.uses_cpu_seconds = True  # type: ignore[method-assign, assignment]
    case = case_of(name)
    net, expected = reference(name)
    parts = np.split(expected, range(int(size), case.judged, int(size)))
    judged = list(zip(case.cut(case.judged, JUDGED, int(size)), parts, strict=True))
    import_before_calls()
    clock = Clock()
    choose = RuntimeChoice.choose_fastest

    def timed(choice: RuntimeChoice) -> Any:
        with clock.part("choice"):
            return choose(choice)

    RuntimeChoice.choose_fastest = timed  # type: ignore[method-assign]
    with clock.part("run"):
        result = MixedPrecision(
            model=net,
            runtime="auto",
            metric=fidelity,
            eval_dataloader=[(_single(inputs), output) for inputs, output in judged],
            calib_dataloader=[
                _single(inputs) for inputs in case.cut(CALIBRATION, CALIBRATED, AT_ONCE)
            ],
            sampling_size=CALIBRATION,
            accuracy_criterion=AccuracyCriterion(float(most_noise), relative=False),
            workspace=folder / f"workspace{size}",
            cache=False,
        )()
    shutil.rmtree(folder / f"ours{size}", ignore_errors=True)
    result.save(folder / f"ours{size}")
    counts = {str(precision): count for precision, count in result.plan.counts().items()}
    return {
        "peak_bytes": peak_memory(),
        **{part: cpu for part, (cpu, _) in clock.parts.items()},
        "runtime": result.framework,
        "met": result.met,
        "plan": counts,
        "trials": len(result.trials),
    }


def fidelity(predictions: Any, expected: Any) -> float:
    """One less the noise of the outputs."""
    return 1 - noise(expected, predictions)


fidelity.higher_is_better = True  # type: ignore[attr-defined]


def _single(inputs: tuple[np.ndarray, ...]) -> Any:
    return inputs[0] if len(inputs) == 1 else inputs


def judge(name: str, folder: Path, file: str) -> dict[str, Any]:
    """Return the noise of a file in OpenVINO."""
    case = case_of(name)
    _, expected = reference(name)
    call = compile_for_openvino(folder / file, case.draw(1, TIMED), F32)
    outputs = [call(inputs) for inputs in case.cut(case.judged, JUDGED, 1)]
    return {"noise": noise(expected, np.concatenate(outputs))}


def compile_for_openvino(
    file: Path, example: tuple[np.ndarray, ...], settings: dict[str, Any]
) -> Call:
    """A model compiled for one shape, called at the least overhead."""
    program = get_core().read_model(file)
    program.reshape(dict(zip(range(len(example)), (a.shape for a in example), strict=True)))
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    request = (
        get_core().compile_model(program, "CPU", {**threads, **settings}).create_infer_request()
    )

    def call(inputs: tuple[np.ndarray, ...]) -> np.ndarray:
        outputs = request.infer(list(inputs), share_inputs=True, share_outputs=True)
        return np.array(outputs[0])

    return call


def _session(file: Path) -> Call:
    """A session whose threads do not spin, as they would take the cores from the others."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [inputs.name for inputs in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True)))[0]


def _contenders(name: str, folder: Path, size: int) -> dict[str, Call]:
    """Return way → the call of a model, for all files that there are."""
    example = case_of(name).draw(size, TIMED)
    ours = folder / f"ours{size}"
    calls = {OPENVINO: compile_for_openvino(folder / "fp32.onnx", example, F32)}
    if ours.exists():
        result = load(ours)
        calls[OURS] = lambda inputs: result(*inputs)
        if (ours / "model.xml").exists():
            noted = choose_precision_hint(get_core().read_model(ours / "model.xml"))
            calls[PLAIN] = compile_for_openvino(
                ours / "model.xml", example, {"INFERENCE_PRECISION_HINT": noted}
            )
    if (folder / "nncf.xml").exists():
        calls[NNCF] = compile_for_openvino(folder / "nncf.xml", example, {})
        calls[NNCF_F32] = compile_for_openvino(folder / "nncf.xml", example, F32)
    if (folder / "static.onnx").exists():
        calls[STATIC] = _session(folder / "static.onnx")
    package = folder / f"pt2e{size}.pt2"
    if package.exists():
        calls[PT2E] = module_call(torch._inductor.aoti_load_package(str(package)))
    return calls


def race(name: str, folder: Path, size: str, rounds: str, clock: str, parts: str) -> dict[str, Any]:
    """Return way → seconds of every round, its noise; operations of a call; the machine's peaks."""
    case = case_of(name)
    net, expected = reference(name)
    inputs = case.draw(int(size), TIMED)
    calls: dict[str, Call] = {TORCH: module_call(net), ORT: _session(folder / "fp32.onnx")}
    if "speed" in parts:
        calls |= _contenders(name, folder, int(size))
    noises = {}
    for label, call in calls.items():
        outputs = [call(batch) for batch in case.cut(case.judged, JUDGED, int(size))]
        noises[label] = noise(expected, np.concatenate(outputs))
    results = own_calls(folder, int(size)) if "own" in parts else {}
    calls |= results
    noises |= own_noise(name, results, expected, int(size))
    timer = time.process_time if clock == "cpu" else time.perf_counter
    runs = {label: repeat_call(call, inputs, timer) for label, call in calls.items()}
    if "speed" in parts and (folder / "lite.tflite").exists():
        runs[TFLITE] = repeat_call(lite_call(folder, name, int(size)), inputs, timer)
        noises[TFLITE] = float((folder / "lite.noise").read_text())
    return {
        "noise": noises,
        "seconds": run_in_turn(runs, int(rounds)),
        "operations": _operations(net, inputs),
        "peaks": _peaks(timer),
    }


def lite(name: str, folder: Path) -> dict[str, Any]:
    """Write the model of Keras as TFLite in INT8, and its noise beside its own FP32."""
    write_lite(name, folder)
    return {}


def _operations(net: torch.nn.Module, inputs: tuple[np.ndarray, ...]) -> int:
    """The multiplications and additions of a call."""
    net.requires_grad_(False)  # the counter follows the gradients of parameters
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        net(*map(torch.from_numpy, inputs))
    return int(counter.get_total_flops())


def _peaks(timer: Callable[[], float]) -> dict[str, float]:
    """Operations per second of the fastest of some products of large matrices, by precision.

    On AMD, torch multiplies floats by MKL at half the speed of oneDNN, which is called directly.
    """
    width, tries = 1024, 10
    floats = torch.randn(2, width, width)
    mkldnn = torch.ops.mkldnn
    packed = mkldnn._reorder_linear_weight(floats[1], width)
    whole = torch.randint(-127, 127, (2, width, width), dtype=torch.int8)
    products: list[tuple[str, Run]] = [
        ("FP32", lambda: floats[0] @ floats[1]),
        ("FP32", lambda: mkldnn._linear_pointwise(floats[0], packed, None, "none", [], "")),
        ("INT8", lambda: torch._int_mm(whole[0], whole[1])),
    ]
    fastest: dict[str, float] = {}
    with torch.inference_mode():
        for precision, run in products:
            once = repeat_call(lambda _, run=run: run(), (), timer)
            rate = 2 * width**3 / min(once() for _ in range(tries))
            fastest[precision] = max(rate, fastest.get(precision, 0))
    return fastest


#: Seconds of a run in a round, at least.
_BLOCK = 0.02


def repeat_call(
    call: Callable[[Any], Any], inputs: Any, timer: Callable[[], float]
) -> Callable[[], float]:
    """Return what runs a call, once without counting, then for a while: mean seconds of a call."""
    call(inputs)
    start = timer()
    call(inputs)
    times = max(1, round(_BLOCK / max(timer() - start, 1e-6)))

    def run() -> float:
        call(inputs)
        start = timer()
        for _ in range(times):
            call(inputs)
        return (timer() - start) / times

    return run


def run_in_turn(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Take turns in a random order, as what runs after a small model finds warm caches."""
    order, timings = random.Random(0), {label: [] for label in runs}
    for _ in range(rounds):
        for label in order.sample(list(runs), len(runs)):
            timings[label].append(runs[label]())
    return timings


STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "make": make,
    "lite": lite,
    "export": export,
    "tune": tune,
    "judge": judge,
    "own": own,
    "race": race,
}


def run_stage(arguments: Sequence[str]) -> None:
    """Run a stage and print what it found as the last line."""
    stage, name, folder, *more = arguments
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    print(json.dumps(STAGES[stage](name, Path(folder), *more)))
