"""What the search benchmark tunes on: scikit-learn's handwritten digits, and what it keeps."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

#: Weights and exported models; ignored by git.
OUT = Path(__file__).resolve().parent.parent / "out"
BATCH = 100


class Digits:
    """A dataset as neural_mp takes it: `dataset[i]` is `(image, label)`; 8×8 pixels in 0…1.

    Args:
        split: `train` (1200 images) or `test` (597).
        channels_last: where the axis of the one channel is.
    """

    def __init__(self, split: str, channels_last: bool = False) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        order = np.random.default_rng(0).permutation(len(data.target))
        chosen = {"train": order[:1200], "test": order[1200:]}[split]
        images = (data.images[chosen] / 16).astype(np.float32)
        self.images = images[..., None] if channels_last else images[:, None]
        self.labels = data.target[chosen].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return self.images[index], self.labels[index]


def kept(name: str, source: str) -> Path:
    """Where something made by a source file is kept; another file once the source changes."""
    OUT.mkdir(exist_ok=True)
    (OUT / ".gitignore").write_text("*\n", encoding="utf-8")
    made_by = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:8]
    stem, _, suffix = name.partition(".")
    return OUT / f"{stem}-{made_by}.{suffix}"
