"""A segmentation model with three outputs, for scikit-learn's handwritten digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

MODEL = Path(__file__).parent / "out" / "strokes.onnx"
OUTPUTS = ["mask", "edges", "digit"]


class Digits:
    """Noisy digits: `dataset[i]` is `(image, labels)`.

    The image is float32 `[1, 16, 16]`. Labels are a dict: `mask`, int64 `[16, 16]`, is 0 for paper,
    1 for light ink, 2 for dark ink; `edges`, int64 `[16, 16]`, is 1 where ink begins; `digit` is
    the class of the whole image.
    """

    def __init__(self, split: str) -> None:
        data = load_digits()
        random = np.random.default_rng(0)
        order = random.permutation(len(data.target))
        chosen = {"train": order[:1200], "test": order[1200:]}[split]
        clean = data.images[chosen].repeat(2, axis=1).repeat(2, axis=2) / 16
        noise = np.random.default_rng(len(chosen)).normal(0, 0.08, clean.shape)
        self.images = (clean + noise).astype(np.float32)[:, None]
        self.masks = (clean > 0.25).astype(np.int64) + (clean > 0.75)
        ink = self.masks > 0
        neighbours = [np.roll(ink, step, axis) for step in (-1, 1) for axis in (1, 2)]
        self.edges = (ink & ~np.logical_and.reduce(neighbours)).astype(np.int64)
        self.digits = data.target[chosen].astype(np.int64)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        labels = {"mask": self.masks, "edges": self.edges, "digit": self.digits}
        return self.images[index], {name: values[index] for name, values in labels.items()}


def model_file() -> str:
    """The path of the model: image float32 [batch, 1, 16, 16] → mask, edges and digit.

    As if it had come from somewhere: the first time, a torch net is trained and exported.
    """
    if not MODEL.exists():
        print("training a net with three outputs and exporting it (about twenty seconds) …")
        MODEL.parent.mkdir(exist_ok=True)
        _export(_trained(), MODEL)
    return str(MODEL)


def _trained():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Strokes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 32, 3, padding=1)
            self.second = nn.Conv2d(32, 32, 3, padding=1)
            self.deep = nn.Conv2d(32, 64, 3, 2, padding=1)
            self.mask = nn.Conv2d(32, 3, 3, padding=1)
            self.edges = nn.Conv2d(32, 2, 3, padding=1)
            self.digit = nn.Linear(64 * 16, 10)

        def forward(self, image):
            shared = F.relu(self.second(F.relu(self.first(image))))
            deep = F.max_pool2d(F.relu(self.deep(shared)), 2)
            return self.mask(shared), self.edges(shared), self.digit(deep.flatten(1))

    torch.manual_seed(0)
    net = Strokes()
    data = Digits("train")
    images, *labels = map(torch.from_numpy, (data.images, data.masks, data.edges, data.digits))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(5):
        for batch in torch.randperm(len(images)).split(64):
            pairs = zip(net(images[batch]), labels, strict=True)
            loss = sum(F.cross_entropy(scores, truth[batch]) for scores, truth in pairs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


def _export(net, path: Path) -> None:
    import torch

    torch.onnx.export(
        net,
        (torch.zeros(2, 1, 16, 16),),
        str(path),
        input_names=["image"],
        output_names=OUTPUTS,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
