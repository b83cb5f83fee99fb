"""The tests' nets as ONNX, and what ONNX Runtime makes of a model by itself.

PyTorch is imported only by what exports from it: other processes import this file, too.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
from machine import machine

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.hardware import Hardware
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.profiling.audit import Verdict, audit_ops
from neural_mp.space import limit_to_reached, list_effective_ops
from neural_mp.testing.products_contract import SIDE

if TYPE_CHECKING:
    from torch import nn

MACHINE = machine(Precision.BF16, Precision.FP16)
#: Name and writer of a file → the file, written once for all processes that run tests.
write_once: Callable[[str, Callable[[Path], None]], Path] | None = None


def as_onnx(net: nn.Module, opset: int = 20) -> onnx.ModelProto:
    """What torch's exporter writes, with an open batch; [batch, 1, 8, 8] → logits."""
    return onnx.load_from_string(_exported(net, opset))


@cache
def _exported(net: nn.Module, opset: int) -> bytes:
    """The file of a net, whose weights no test changes afterwards."""
    kinds = {f"{type(part).__module__}.{type(part).__qualname__}" for part in net.modules()}
    weights = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
    described = f"{net} {sorted(kinds)} {opset}".encode()
    digest = hashlib.sha256(described + weights).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as folder:
        write_for_all = write_once or (lambda name, write: _write(Path(folder) / name, write))
        return write_for_all(f"{digest}.onnx", partial(_export, net, opset)).read_bytes()


def _write(file: Path, write: Callable[[Path], None]) -> Path:
    write(file)
    return file


def _export(net: nn.Module, opset: int, file: Path) -> None:
    import torch

    torch.onnx.export(
        net.eval(),
        (torch.rand(2, 1, 8, 8),),
        str(file),
        input_names=["image"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=opset,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def convolutions(net: nn.Sequential) -> onnx.ModelProto:
    """A net in a row like `nets.deep_net`, without torch's exporter, which takes seconds."""
    from torch import nn

    nodes, constants, value = [], {}, "image"
    for name, layer in net.named_children():
        inputs = value
        if isinstance(layer, nn.Conv2d | nn.Linear):
            for part, weights in layer.named_parameters():
                constants[f"{name}.{part}"] = weights.detach().numpy()
            inputs = f"{value} {name}.weight {name}.bias"
        kind, attributes = {
            nn.Conv2d: ("Conv", {"pads": [1, 1, 1, 1]}),
            nn.ReLU: ("Relu", {}),
            nn.MaxPool2d: ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
            nn.Flatten: ("Flatten", {}),
            nn.Linear: ("Gemm", {"transB": 1}),
        }[type(layer)]
        value = f"out{name}"
        nodes.append(op(kind, inputs, value, **attributes))
    return graph(nodes, {"image": ["batch", 1, 8, 8]}, [value], constants)


def session(model: onnx.ModelProto | str, **settings: Any) -> ort.InferenceSession:
    """A session as a user makes one."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for name, value in settings.items():
        setattr(options, name, value)
    source = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto | str, **feeds: np.ndarray) -> list[np.ndarray]:
    """What ONNX Runtime computes, without us."""
    return session(model).run(None, feeds)


def kernels(model: onnx.ModelProto | str) -> Counter[str]:
    """The ops that are left when ONNX Runtime has made kernels of a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "optimized.onnx")
        session(model, optimized_model_filepath=path)
        return Counter(node.op_type for node in onnx.load(path).graph.node)


def graph(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list],
    outputs: list[str],
    constants: dict[str, np.ndarray] | None = None,
    *,
    opset: int = 20,
    ir_version: int = 10,
) -> onnx.ModelProto:
    """A model of float inputs by shape; the names of its nodes are those of their results."""
    for node in nodes:
        node.name = node.name or node.output[0]
    proto = onnx.helper.make_graph(
        nodes,
        "graph",
        [
            onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s)
            for n, s in inputs.items()
        ],
        [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in outputs],
        [onnx.numpy_helper.from_array(a, n) for n, a in (constants or {}).items()],
    )
    return onnx.helper.make_model(
        proto, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=ir_version
    )


def op(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    """A node; inputs separated by spaces, `-` for one left out."""
    sources = ["" if name == "-" else name for name in inputs.split()]
    return onnx.helper.make_node(kind, sources, output.split(), **attributes)


def dense_net(classes: int, noise: float = 0.0) -> onnx.ModelProto:
    """Two matrix products of [batch, 6] inputs; random numbers of that size are added to logits."""
    draw = np.random.default_rng(0)
    weights = {
        "one": draw.normal(size=(6, 64)).astype(np.float32),
        "two": draw.normal(size=(64, classes)).astype(np.float32),
    }
    nodes = [op("MatMul", "x one", "a"), op("Relu", "a", "b"), op("MatMul", "b two", "c")]
    nodes += [op("RandomNormalLike", "c", "d", scale=noise), op("Add", "c d", "y")]
    return graph(
        nodes if noise else nodes[:3], {"x": ["batch", 6]}, ["y" if noise else "c"], weights
    )


class Converted:
    """A model all in one precision, calibrated on the data it is then run on.

    It runs as planned, but for the ops of branches that the data does not take.
    """

    def __init__(
        self,
        model: onnx.ModelProto | str,
        data: dict[str, np.ndarray],
        precision: Precision = Precision.INT8,
        machine: Hardware = MACHINE,
        weight: QuantSpec | None = None,
        **plan: Precision,
    ) -> None:
        self.adaptor = OnnxRuntimeAdaptor()
        self.float = self.adaptor.load(model)
        self.space = self.adaptor.space(self.float, machine)
        self.observed = self.adaptor.observe(self.float, [data], self.space)
        self.space = limit_to_reached(self.space, self.observed.ranges)
        chosen = {
            op: self.space.capabilities[op].config(precision) or FP32
            for op in self.space.tunable_ops
        }
        if weight is not None:
            chosen = {op: replace(config, weight=weight) for op, config in chosen.items()}
        chosen.update({op: OpConfig(override) for op, override in plan.items()})
        resolved = self.space.resolve(PrecisionPlan(chosen))
        self.model = self.adaptor.convert(self.float, resolved, self.observed, self.space)
        ran = self.adaptor.trace_kernels(self.model, data)
        self.audit = audit_ops(list_effective_ops(self.space, resolved), ran, lambda _: False)
        verdicts = [(op.name, op.verdict) for op in self.audit.findings]
        harmless = (Verdict.NOT_REACHED, Verdict.PASSED_INT8)
        failures = [(name, verdict) for name, verdict in verdicts if verdict not in harmless]
        assert not failures
        self.reference = self.adaptor.predict(self.float, data)
        self.result = self.adaptor.predict(self.model, data)
        self.kernels = kernels(self.adaptor.native(self.model))

    @property
    def integer_convolutions(self) -> int:
        """The number of convolutions that run in integers.

        A pointwise convolution that is read in float runs as a product.
        """
        return self.kernels["QLinearConv"] + self.kernels["MatMulIntegerToFloat"]

    def scale(self, tensor: str) -> tuple[float, int]:
        """The scale and zero point of a tensor, from its range."""
        low, high = self.observed.ranges[tensor]["minmax"]
        scale = (max(high, 0) - min(low, 0)) / 255
        return scale, round(-min(low, 0) / scale)


#: Kind of node → the field of a case that asks for it.
_STEPS = {"Add": "residual", "Relu": "relu"}


def product_graph(case: Any, weight: np.ndarray) -> onnx.ModelProto:
    """A product or convolution of `AccumulationContract`, with its sum and ReLU."""
    rest = [name for name in ("Add", "Relu") if getattr(case, _STEPS[name])]
    names = [f"t{index}" for index in range(len(rest))] + ["y"]
    if case.dense:
        nodes = [op("MatMul", "x w", names[0])]
        shape, weight = ["n", case.inputs], weight.T.copy()
    else:
        nodes = [op("Conv", "x w", names[0], group=case.groups, pads=[1] * 4)]
        shape = ["n", case.inputs, SIDE, SIDE]
    for index, kind in enumerate(rest):
        inputs = f"{names[index]} x" if kind == "Add" else names[index]
        nodes.append(op(kind, inputs, names[index + 1]))
    return graph(nodes, {"x": shape}, ["y"], {"w": weight})
