"""What people reach for otherwise: ONNX Runtime's own tool, torch's dynamic layers, torchao's PT2E.

Each takes a case and a folder, and gives what runs a batch, and the file it lies in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real.case import Batches, Case

Run = Callable[[Any], Any]


def session_run(path: str | Path) -> Run:
    """A plain session of ONNX Runtime: inputs, by name or the only one → outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Any) -> Any:
        fed = inputs if isinstance(inputs, dict) else {names[0]: inputs}
        results = session.run(None, fed)
        return results[0] if len(results) == 1 else results

    return run


def quantize_static(case: Case, folder: Path) -> tuple[Run, Path]:
    """As its documentation advises: preprocessed, weights per channel."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from benchmarks.peers.static_quantization import write_static

    source, target = case.source(folder), folder / "static.onnx"
    prepared = folder / "prepared.onnx"
    try:
        quant_pre_process(str(source), str(prepared))
    except Exception:  # noqa: BLE001 – it fails with whatever its parts raise; then it is left out
        prepared = Path(source)

    write_static(prepared, target, _feeds(source, case.batches("calibration")))
    return session_run(target), target


def quantize_dynamic(case: Case, folder: Path) -> tuple[Run, Path]:
    """With the tool's defaults."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    target = folder / "dynamic.onnx"
    model = onnx.load(case.source(folder))
    del model.graph.value_info[:]  # it stumbles over constants that are listed there
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "model.onnx"
        onnx.save(model, source)
        quantize_dynamic(str(source), str(target))
    return session_run(target), target


def _feeds(source: Any, batches: Batches) -> Iterator[dict[str, np.ndarray]]:
    import onnx

    graph = onnx.load(source, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    (first, *_) = (value.name for value in graph.input if value.name not in constants)
    for inputs, _ in batches:
        yield inputs if isinstance(inputs, dict) else {first: inputs}


def module_run(module: Any) -> Run:
    """A torch module: arrays, by position → array."""
    import torch

    def run(inputs: Any) -> np.ndarray:
        values = inputs.values() if isinstance(inputs, dict) else [inputs]
        with torch.no_grad():
            return module(*map(torch.from_numpy, values)).numpy()

    return run


def graph_run(path: str) -> Run:
    """A SavedModel or a frozen graph as TensorFlow runs it: array → the only output."""
    import tensorflow as tf

    if Path(path).is_dir():
        served = tf.saved_model.load(path).signatures["serving_default"]
        (name,) = served.structured_input_signature[1]
        return lambda inputs: next(iter(served(**{name: tf.constant(inputs)}).values())).numpy()
    definition = tf.compat.v1.GraphDef.FromString(Path(path).read_bytes())
    consumed = {
        source.split(":")[0].lstrip("^") for node in definition.node for source in node.input
    }
    (first,) = (node.name for node in definition.node if node.op == "Placeholder")
    last = next(n.name for n in reversed(definition.node) if n.name not in consumed)
    # A session of its own: eager functions of the same name that this process made would clash.
    graph = tf.Graph()
    with graph.as_default():
        tf.compat.v1.import_graph_def(definition, name="")
    session = tf.compat.v1.Session(graph=graph)
    run = session.make_callable(f"{last}:0", feed_list=[f"{first}:0"])
    return lambda inputs: np.asarray(run(inputs))


def torch_dynamic(case: Case, folder: Path) -> tuple[Run, Path]:
    """Dense and recurrent layers with ranges found on every run."""
    import torch
    from torch import nn

    quantized = torch.ao.quantization.quantize_dynamic(
        case.source(folder), {nn.Linear, nn.LSTM, nn.GRU}, dtype=torch.qint8
    )
    target = folder / "dynamic.pt"
    torch.save(quantized.state_dict(), target)
    return module_run(quantized), target


def torchao_pt2e(case: Case, folder: Path) -> tuple[Run, Path]:
    """Exported, quantized for x86, compiled."""
    import torch

    from benchmarks.peers import pt2e

    calibration = [
        tuple(map(torch.from_numpy, inputs.values()))
        for inputs, _ in case.batches("calibration")
        if len(next(iter(inputs.values()))) == case.batches("test").batch_size
    ]
    quantized = pt2e.converted(case.source(folder), calibration)
    target = folder / "pt2e.pt"
    torch.save(quantized.state_dict(), target)
    return module_run(torch.compile(quantized)), target


PEERS: dict[str, Callable[[Case, Path], tuple[Run, Path]]] = {
    "quantize_static": quantize_static,
    "quantize_dynamic": quantize_dynamic,
    "torch.ao dynamic": torch_dynamic,
    "torchao PT2E": torchao_pt2e,
}
