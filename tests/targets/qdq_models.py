"""Small QDQ models by the rules of a profile, written without the writer under test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from neural_mp.core.enums import Scheme
from neural_mp.targets import TargetProfile

IMAGE = (1, 3, 8, 8)
#: Tensor → range of its values, for the images of `sample`.
RANGES = {
    "x": (-2.0, 2.0),
    "conv": (-6.0, 6.0),
    "gate": (0.0, 1.0),
    "product": (-1.0, 6.0),
    "mean": (-0.5, 2.0),
    "scores": (-4.0, 4.0),
    "norm": (-3.0, 3.0),
}


def emulated(test):
    """Mark a test that starts the emulation."""
    is_missing = importlib.util.find_spec("onnxruntime_qnn") is None
    reason = "requires onnxruntime-qnn: pip install -e '.[qnn]', on Python 3.11 or later"
    return pytest.mark.slow(pytest.mark.skipif(is_missing, reason=reason)(test))


def sample(seed: int = 0) -> dict[str, np.ndarray]:
    """An image whose values fit the ranges."""
    draw = np.random.default_rng(seed)
    return {"x": draw.uniform(-2, 2, IMAGE).astype(np.float32)}


def grid(low: float, high: float, dtype: np.dtype, profile: TargetProfile):
    """Return scale and zero point of an activation."""
    info, rules = np.iinfo(dtype), profile.activation
    if rules.scheme is Scheme.SYMMETRIC:
        scale, zero = max(-low, high) / ((info.max - info.min) // 2), (info.max + info.min + 1) // 2
    else:
        scale = (high - low) / (info.max - info.min)
        zero = round(info.min - low / scale)
    if rules.scale == "power_of_two":
        scale = 2.0 ** np.ceil(np.log2(scale))
    return np.float32(scale), dtype.type(zero)


class Builder:
    """Writes ops with their pairs, one after the other."""

    def __init__(self, profile: TargetProfile, bits: int) -> None:
        self.profile, self.bits = profile, bits
        self.dtype = np.dtype(profile.activation.of_bits(bits).value)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.scales: dict[str, np.ndarray] = {}
        self.draw = np.random.default_rng(1)

    def add(self, op_type: str, inputs: list[str], result: str, **attributes: object) -> str:
        name = f"{result}.{op_type}"
        self.nodes.append(helper.make_node(op_type, inputs, [result], name, **attributes))
        return result

    def pair(self, tensor: str, result: str, like: str = "") -> str:
        """Store a tensor, and return its float; `like` names a tensor with the same parameters."""
        scale, zero = grid(*RANGES[like or result], self.dtype, self.profile)
        kind = next((node.op_type for node in self.nodes if tensor in node.output), "")
        for dtype, numbers in self.profile.fixed.get(kind, {}).items():
            if dtype.value == self.dtype.name:
                scale, zero = np.float32(numbers[0]), self.dtype.type(numbers[1])
        self.constants |= {f"{result}/scale": scale, f"{result}/zero": zero}
        self.scales[f"{result}/float"] = scale
        parameters = [f"{result}/scale", f"{result}/zero"]
        self.add("QuantizeLinear", [tensor, *parameters], f"{result}/stored")
        return self.add("DequantizeLinear", [f"{result}/stored", *parameters], f"{result}/float")

    def stored_if(self, always: bool, tensor: str, like: str = "") -> str:
        """Store a result if the profile stores those of all ops."""
        return self.pair(tensor, tensor.removesuffix("/raw"), like) if always else tensor

    def weight(self, op: str, shape: tuple[int, ...], axis: int, kind: str) -> str:
        rules, name = self.profile.weight, f"{op}/weight"
        values = self.draw.normal(0, 0.2, shape).astype(np.float32)
        dtype = np.dtype(rules.of_bits(kind, 8).value)
        most = np.iinfo(dtype).max
        values = values if dtype.kind == "i" else np.abs(values) + 0.5
        by_channel = rules.granularity_of(kind) == "per_channel"
        rest = tuple(i for i in range(len(shape)) if i != axis) if by_channel else None
        scale = np.float32(np.abs(values).max(axis=rest) / most)
        if rules.scale == "power_of_two":
            scale = np.exp2(np.ceil(np.log2(scale)))
        by_axis = scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        integers = np.clip(np.rint(values / (by_axis if by_channel else scale)), -most, most)
        zero = np.zeros(scale.shape, dtype)
        self.constants |= {f"{name}/scale": scale, f"{name}/zero": zero}
        self.scales[f"{name}/float"] = scale
        attributes = {"axis": axis} if by_channel else {}
        parameters = [f"{name}/scale", f"{name}/zero"]
        if self.profile.placement.weights == "qdq":
            self.constants[f"{name}/given"] = values
            inputs = [f"{name}/given", *parameters]
            self.add("QuantizeLinear", inputs, f"{name}/stored", **attributes)
        else:
            self.constants[f"{name}/stored"] = integers.astype(dtype)
        inputs = [f"{name}/stored", *parameters]
        return self.add("DequantizeLinear", inputs, f"{name}/float", **attributes)

    def bias(self, op: str, size: int, data: str, weight: str) -> str:
        values, name = np.linspace(-1, 1, size).astype(np.float32), f"{op}/bias"
        if self.profile.bias == "float":
            self.constants[name] = values
            return name
        if self.profile.bias == "int32":
            scale = np.float32(self.scales[data] * self.scales[weight])
        else:
            scale = np.float32(2.0**-6)
        zero = np.zeros(scale.shape, self.profile.bias)
        integers = np.rint(values / scale).astype(self.profile.bias)
        self.constants |= {
            f"{name}/stored": integers,
            f"{name}/scale": scale,
            f"{name}/zero": zero,
        }
        inputs = [f"{name}/{part}" for part in ("stored", "scale", "zero")]
        attributes = {"axis": 0} if scale.ndim else {}
        return self.add("DequantizeLinear", inputs, f"{name}/float", **attributes)

    def model(self, output: tuple[str, tuple[int, ...]]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "qdq",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, IMAGE)],
            [helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])],
            [numpy_helper.from_array(np.asarray(a), name) for name, a in self.constants.items()],
        )
        opset = helper.make_opsetid("", self.profile.opset[1])
        return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def gated_net(profile: TargetProfile, bits: int | None = None) -> onnx.ModelProto:
    """A convolution with a sigmoid gate, a mean and a linear layer, as the profile wants it."""
    build = Builder(profile, bits or profile.activation.types[0].bits)
    always = profile.placement.outputs == "always"
    build.add("MaxPool", [build.pair("x", "x")], "pool/raw", kernel_shape=[2, 2], strides=[1, 1])
    data = build.pair("pool/raw", "pool", like="x")
    weight = build.weight("conv", (8, 3, 3, 3), 0, "Conv")
    inputs = [data, weight, build.bias("conv", 8, data, weight)]
    conv = build.stored_if(always, build.add("Conv", inputs, "conv/raw"))
    gate = build.stored_if(always, build.add("Sigmoid", [conv], "gate/raw"))
    product = build.stored_if(always, build.add("Mul", [conv, gate], "product/raw"))
    keeps = "GlobalAveragePool" in profile.same_scale
    build.add("GlobalAveragePool", [product], "mean/raw")
    mean = build.stored_if(always, "mean/raw", "product" if keeps else "")
    build.add("Flatten", [mean], "flat/raw")
    flat = build.pair("flat/raw", "flat", like="product" if keeps else "mean")
    weight = build.weight("scores", (8, 5), 1, "Gemm")
    inputs = [flat, weight, build.bias("scores", 5, flat, weight)]
    scores = build.stored_if(always, build.add("Gemm", inputs, "scores/raw"))
    return build.model((scores, (1, 5)))


def normalized_net(profile: TargetProfile, bits: int | None = None) -> onnx.ModelProto:
    """A layer normalization ahead of a linear layer; all results are stored."""
    build = Builder(profile, bits or profile.activation.types[0].bits)
    build.add("Flatten", [build.pair("x", "x")], "flat/raw")
    flat = build.pair("flat/raw", "flat", like="x")
    weight = build.weight("norm", (192,), 0, "LayerNormalization")
    inputs = [flat, weight, build.bias("norm", 192, flat, weight)]
    norm = build.pair(build.add("LayerNormalization", inputs, "norm/raw"), "norm")
    weight = build.weight("scores", (192, 5), 1, "Gemm")
    inputs = [norm, weight, build.bias("scores", 5, norm, weight)]
    scores = build.pair(build.add("Gemm", inputs, "scores/raw"), "scores")
    return build.model((scores, (1, 5)))


def node_of(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def constant_of(model: onnx.ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(i for i in model.graph.initializer if i.name == name))


def put_constant(model: onnx.ModelProto, name: str, array: object) -> str:
    """Replace a constant, or add one."""
    rest = [item for item in model.graph.initializer if item.name != name]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*rest, numpy_helper.from_array(np.asarray(array), name)])
    return name


def pairs_of(model: onnx.ModelProto, tensor: str) -> Iterator[onnx.NodeProto]:
    """The QuantizeLinear and DequantizeLinear with the parameters of a tensor."""
    return (node for node in model.graph.node if f"{tensor}/scale" in node.input)
