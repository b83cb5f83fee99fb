"""Google's Magika: the first and last kilobyte of a file in, the type of the file out."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.real.case import Accuracy, Batches, Case, Split, shipped

BATCH, MOST_PER_TYPE, LEAST_BYTES, BLOCK = 16, 24, 200, 4096
#: Ending → what the model calls files with it.
TYPES = {
    ".py": "python",
    ".pyc": "pythonbytecode",
    ".md": "markdown",
    ".rst": "rst",
    ".json": "json",
    ".toml": "toml",
    ".yaml": "yaml",
    ".c": "c",
    ".css": "css",
    ".js": "javascript",
    ".html": "html",
    ".sh": "shell",
    ".csv": "csv",
    ".npy": "npy",
    ".npz": "npz",
    ".png": "png",
    ".gif": "gif",
    ".zip": "zip",
    ".so": "elf",
    ".exe": "pebin",
    ".gz": "gzip",
    ".pdf": "pdf",
    ".svg": "svg",
    ".ttf": "ttf",
    ".tex": "latex",
    ".bat": "batch",
    ".ipynb": "ipynb",
    ".pkl": "pickle",
}


def _model(name: str) -> Path:
    return shipped("magika", "models", "standard_v3_3", name)


@cache
def _config() -> dict:
    return json.loads(_model("config.min.json").read_text(encoding="utf-8"))


def _files() -> Iterator[Path]:
    """Those of this repository, and of the Python that runs this."""
    yield from sorted(Path(__file__).parents[2].rglob("[!.]*.*"))
    for key in ("stdlib", "purelib", "platlib"):
        yield from sorted(Path(sysconfig.get_path(key)).rglob("*.*"))


def features(content: bytes) -> list[int]:
    """What the package itself makes of a file."""
    config = _config()
    padding, first, last = (config[key] for key in ("padding_token", "beg_size", "end_size"))
    head, tail = content[:BLOCK].lstrip()[:first], content[-BLOCK:].rstrip()[-last:]
    blank_head, blank_tail = [padding] * (first - len(head)), [padding] * (last - len(tail))
    return [*head, *blank_head, *blank_tail, *tail]


@cache
def _samples() -> tuple[np.ndarray, np.ndarray]:
    labels = _config()["target_labels_space"]
    by_type: dict[str, list[list[int]]] = {ending: [] for ending in TYPES}
    for path in _files():
        if all(len(samples) >= MOST_PER_TYPE for samples in by_type.values()):
            break
        of_type = by_type.get(path.suffix)
        if of_type is None or len(of_type) >= MOST_PER_TYPE or not path.is_file():
            continue
        content = path.read_bytes()
        if len(content) >= LEAST_BYTES:
            of_type.append(features(content))
    numbered = [
        (row, labels.index(TYPES[ending])) for ending, rows in by_type.items() for row in rows
    ]
    order = np.random.default_rng(0).permutation(len(numbered))
    rows, targets = zip(*(numbered[i] for i in order), strict=True)
    return np.asarray(rows, np.int32), np.asarray(targets)


def batches(split: Split) -> Batches:
    rows, targets = _samples()
    chosen = slice(0, 64) if split == "calibration" else slice(64, None)
    rows, targets = rows[chosen], targets[chosen]
    parts = (slice(i, i + BATCH) for i in range(0, len(rows) - BATCH + 1, BATCH))
    return Batches([(rows[part], targets[part]) for part in parts], BATCH)


CASE = Case(
    "onnxrt",
    lambda scratch: str(_model("model.onnx")),
    batches,
    Accuracy,
    ("quantize_static", "quantize_dynamic"),
)
