"""Small decoders with a key-value cache, as ONNX Runtime GenAI and Optimum write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WORDS, WIDTH, HEADS, PAIRS, HEAD, INNER, LAYERS = 60, 64, 4, 2, 16, 96, 2
_LONGEST = 64
MICROSOFT = "com.microsoft"


class _Builder:
    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def op(self, kind: str, inputs: str, name: str, count: int = 1, **attributes: Any) -> str:
        """Add a node with the name of its first result, and return that; `.` omits an input."""
        outputs = [name, *(f"{name}:{index}" for index in range(1, count))]
        sources = ["" if source == "." else source for source in inputs.split()]
        domain = attributes.pop("domain", "")
        node = helper.make_node(kind, sources, outputs, name=name, domain=domain, **attributes)
        self.nodes.append(node)
        return name

    def constant(self, name: str, value: Any, dtype: type = np.float32) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def dense(self, x: str, inputs: int, outputs: int, name: str) -> str:
        weight = self.random.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        return self.op("MatMul", f"{x} {self.constant(f'{name}.weight', weight)}", name)

    def norm(self, x: str, name: str) -> str:
        scale = self.constant(f"{name}.weight", 1 + self.random.random(WIDTH) / 4)
        return self.op("SimplifiedLayerNormalization", f"{x} {scale}", name, axis=-1, epsilon=1e-5)

    def body(self, x: str, attended: str, index: int) -> str:
        """Everything of a layer behind its attention."""
        stem = f"layers.{index}"
        x = self.op("Add", f"{x} {self.dense(attended, WIDTH, WIDTH, f'{stem}.o')}", f"{stem}.mid")
        normed = self.norm(x, f"{stem}.norm2")
        gate = self.dense(normed, WIDTH, INNER, f"{stem}.gate")
        up = self.dense(normed, WIDTH, INNER, f"{stem}.up")
        open_ = self.op("Sigmoid", gate, f"{stem}.sigmoid")
        gated = self.op("Mul", f"{gate} {open_}", f"{stem}.silu")
        product = self.op("Mul", f"{gated} {up}", f"{stem}.product")
        down = self.dense(product, INNER, WIDTH, f"{stem}.down")
        return self.op("Add", f"{x} {down}", f"{stem}.out")

    def finished(self, x: str) -> onnx.ModelProto:
        logits = self.dense(self.norm(x, "norm"), WIDTH, WORDS, "logits")
        cached = ["batch", PAIRS, "past", HEAD]
        names = [f"{index}.{kind}" for index in range(LAYERS) for kind in ("key", "value")]
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
            *(
                helper.make_tensor_value_info(f"past_key_values.{name}", TensorProto.FLOAT, cached)
                for name in names
            ),
        ]
        present = ["batch", PAIRS, "total", HEAD]
        results = [
            helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", "length", WORDS]),
            *(
                helper.make_tensor_value_info(f"present.{name}", TensorProto.FLOAT, present)
                for name in names
            ),
        ]
        graph = helper.make_graph(self.nodes, "decoder", inputs, results, self.constants)
        versions = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=versions, ir_version=10)

    def embedded(self) -> str:
        table = self.constant("table", self.random.standard_normal((WORDS, WIDTH)))
        return self.op("Gather", f"{table} input_ids", "embed")


def genai() -> onnx.ModelProto:
    """A decoder with GroupQueryAttention, as the model builder of ONNX Runtime GenAI writes it."""
    builder = _Builder()
    x = builder.embedded()
    builder.constant("one", [1], np.int64)
    builder.op("ReduceSum", "attention_mask one", "lengths", keepdims=0)
    builder.op("Sub", "lengths one", "lengths_less_one")
    builder.op("Cast", "lengths_less_one", "seqlens_k", to=TensorProto.INT32)
    builder.op("Shape", "attention_mask", "mask_shape")
    builder.op(
        "Gather", f"mask_shape {builder.constant('axis', 1, np.int64)}", "total_length", axis=0
    )
    builder.op("Cast", "total_length", "total", to=TensorProto.INT32)
    angles = np.outer(np.arange(_LONGEST), 100.0 ** -(np.arange(HEAD // 2) / (HEAD // 2)))
    builder.constant("cos", np.cos(angles))
    builder.constant("sin", np.sin(angles))
    for index in range(LAYERS):
        stem = f"layers.{index}"
        normed = builder.norm(x, f"{stem}.norm1")
        q, k, v = (
            builder.dense(normed, WIDTH, size * HEAD, f"{stem}.{part}")
            for part, size in zip("qkv", (HEADS, PAIRS, PAIRS), strict=True)
        )
        past = f"past_key_values.{index}"
        node = helper.make_node(
            "GroupQueryAttention",
            [q, k, v, f"{past}.key", f"{past}.value", "seqlens_k", "total", "cos", "sin"],
            [f"{stem}.attn", f"present.{index}.key", f"present.{index}.value"],
            name=f"{stem}.attn",
            domain=MICROSOFT,
            num_heads=HEADS,
            kv_num_heads=PAIRS,
            do_rotary=1,
        )
        builder.nodes.append(node)
        x = builder.body(x, f"{stem}.attn", index)
    return builder.finished(x)


def optimum() -> onnx.ModelProto:
    """A decoder whose attention is written in standard ops, as Optimum exports it."""
    builder = _Builder(1)
    x = builder.embedded()
    builder.constant("split_q", [0, 0, HEADS, HEAD], np.int64)
    builder.constant("split_kv", [0, 0, PAIRS, HEAD], np.int64)
    builder.constant("repeat", [1, HEADS // PAIRS, 1, 1], np.int64)
    builder.constant("joined", [0, 0, WIDTH], np.int64)
    builder.constant("scale", HEAD**-0.5)
    builder.op("Shape", "input_ids", "length", start=1, end=2)
    builder.op("Shape", "attention_mask", "total", start=1, end=2)
    builder.op("Concat", "length total", "square", axis=0)
    builder.op("Sub", "total length", "offset")
    builder.op("Squeeze", "offset", "diagonal")
    builder.constant("one", 1, np.int64)
    builder.op("Add", "diagonal one", "above")
    builder.op("ConstantOfShape", "square", "full", value=helper.make_tensor("", 1, [1], [-1e9]))
    builder.op("Trilu", "full above", "mask", upper=1)
    for index in range(LAYERS):
        stem, past = f"layers.{index}", f"past_key_values.{index}"
        normed = builder.norm(x, f"{stem}.norm1")
        heads = []
        for part, size in zip("qkv", (HEADS, PAIRS, PAIRS), strict=True):
            dense = builder.dense(normed, WIDTH, size * HEAD, f"{stem}.{part}")
            shape = "split_q" if part == "q" else "split_kv"
            split = builder.op("Reshape", f"{dense} {shape}", f"{dense}.split")
            heads.append(builder.op("Transpose", split, f"{dense}.heads", perm=[0, 2, 1, 3]))
        for position, kind in ((1, "key"), (2, "value")):
            present = builder.op(
                "Concat", f"{past}.{kind} {heads[position]}", f"present.{index}.{kind}", axis=2
            )
            heads[position] = builder.op("Tile", f"{present} repeat", f"{stem}.{kind}s")
        transposed = builder.op("Transpose", heads[1], f"{stem}.turned", perm=[0, 1, 3, 2])
        scores = builder.op("MatMul", f"{heads[0]} {transposed}", f"{stem}.scores")
        scaled = builder.op("Mul", f"{scores} scale", f"{stem}.scaled")
        masked = builder.op("Add", f"{scaled} mask", f"{stem}.masked")
        weights = builder.op("Softmax", masked, f"{stem}.weights", axis=-1)
        mixed = builder.op("MatMul", f"{weights} {heads[2]}", f"{stem}.mixed")
        back = builder.op("Transpose", mixed, f"{stem}.back", perm=[0, 2, 1, 3])
        x = builder.body(x, builder.op("Reshape", f"{back} joined", f"{stem}.attn"), index)
    return builder.finished(x)


def feeds(ids: np.ndarray, past: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Inputs for tokens behind a cache; without one, the cache is empty."""
    rows = len(ids)
    if past is None:
        empty = np.zeros((rows, PAIRS, 0, HEAD), np.float32)
        kinds = ("key", "value")
        past = {f"past_key_values.{i}.{k}": empty for i in range(LAYERS) for k in kinds}
    length = next(iter(past.values())).shape[2] + ids.shape[1]
    return {"input_ids": ids, "attention_mask": np.ones((rows, length), np.int64), **past}


def generate(session: Any, prompt: np.ndarray, count: int) -> list[int]:
    """Tokens that greedy decoding with the cache appends to a prompt."""
    inputs, tokens = feeds(prompt), []
    names = [output.name for output in session.get_outputs()]
    for _ in range(count):
        results = dict(zip(names, session.run(None, inputs), strict=True))
        token = results["logits"][:, -1:].argmax(-1)
        tokens.append(int(token[0, 0]))
        past = {
            name.replace("present", "past_key_values"): value
            for name, value in results.items()
            if name.startswith("present")
        }
        inputs = feeds(token, past)
    return tokens
