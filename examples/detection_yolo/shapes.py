"""A YOLO-shaped detector of synthetic shapes: its images in the folders of YOLO, and its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

OUT = Path(__file__).parent / "out"
NAMES, SIDE, STRIDE = ("circle", "square"), 48, 8


def write_images(folder: Path, split: str, count: int, seed: int) -> None:
    """Write images of up to three shapes, and their label files."""
    from PIL import Image

    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    for part in ("images", "labels"):
        (folder / part / split).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image = np.full((SIDE, SIDE, 3), 128.0) + random.uniform(-40, 40, 3)
        lines = []
        for corner in random.permutation(4)[: random.integers(1, 4)]:
            size, kind = random.uniform(12, 22), int(random.integers(2))
            left, top = random.uniform(0, 24 - size, 2) + 24 * np.array([corner % 2, corner // 2])
            x, y = (columns - left) / size, (rows - top) / size
            inside = (abs(x - 0.5) < 0.5) & (abs(y - 0.5) < 0.5)
            if NAMES[kind] == "circle":
                inside &= (x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.25
            image[inside] = random.uniform(0, 255, 3)
            box = np.array([left + size / 2, top + size / 2, size, size]) / SIDE
            lines.append(f"{kind} " + " ".join(f"{value:.5f}" for value in box))
        pixels = (image + random.normal(0, 8, image.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / split / f"{number}.png")
        (folder / "labels" / split / f"{number}.txt").write_text("\n".join(lines))


def prepare_data() -> Path:
    """Return `data.yaml`, which ultralytics would read, too; the first time, write the images."""
    folder = OUT / "shapes"
    if not (folder / "data.yaml").exists():
        write_images(folder, "train", 300, seed=0)
        write_images(folder, "val", 100, seed=1)
        (folder / "data.yaml").write_text(
            "train: images/train\nval: images/val\nnames: [circle, square]\n"
        )
    return folder / "data.yaml"


def model_file() -> str:
    """The path of the model: images [batch, 3, 48, 48] → boxes and scores [batch, 6, 36].

    As if it had come from somewhere: the first time, a torch net is trained and exported.
    """
    path = OUT / "shapes.onnx"
    data = prepare_data()
    if not path.exists():
        print("training a detector and exporting it (about a minute) …")
        _export(_trained(data), path)
    return str(path)


def _trained(data: Path):
    import torch
    from torch import nn
    from torch.nn import functional as F

    from neural_mp.data import build_dataloader

    def layer(inputs, outputs, stride):
        conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                layer(3, 16, 2),
                layer(16, 32, 2),
                layer(32, 48, 1),
                layer(48, 64, 2),
                layer(64, 64, 1),
            )
            self.boxes = nn.Sequential(layer(64, 32, 1), nn.Conv2d(32, 4, 1))
            self.scores = nn.Sequential(layer(64, 32, 1), nn.Conv2d(32, 2, 1))
            cells = torch.arange(SIDE // STRIDE) + 0.5
            y, x = torch.meshgrid(cells, cells, indexing="ij")
            self.register_buffer("centers", torch.stack([x, y]).flatten(1))

        def raw(self, images):
            maps = self.backbone(images)
            both = torch.cat([self.boxes(maps), self.scores(maps)], 1).flatten(2)
            moved, sides, logits = both.split([2, 2, 2], 1)
            boxes = torch.cat([self.centers + moved, sides.exp()], 1) * STRIDE
            return boxes, logits

        def forward(self, images):
            boxes, logits = self.raw(images)
            return torch.cat([boxes, logits.sigmoid()], 1)

    spec = {"dataset": {"yolo": {"data": str(data), "split": "train"}}, "batch_size": 20}
    batches = list(build_dataloader(spec | {"transform": {"Rescale": {}, "ToCHW": {}}}))
    torch.manual_seed(0)
    net = Detector()
    steps = 15 * len(batches)
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps)
    for step in range(steps):
        images, labels = batches[step % len(batches)]
        boxes, logits = net.raw(torch.from_numpy(images))
        targets, distance, count = torch.zeros_like(logits), 0, 0
        for index, label in enumerate(labels):
            corners = torch.from_numpy(label["boxes"])
            middle, sides = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
            column, row = (middle / STRIDE).long().clamp(0, SIDE // STRIDE - 1).T
            cell = row * (SIDE // STRIDE) + column
            targets[index, torch.from_numpy(label["labels"]), cell] = 1.0
            target = torch.cat([middle, sides], 1)
            distance = distance + (boxes[index, :, cell].T - target).abs().sum()
            count += len(cell)
        loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        loss = (loss + distance / STRIDE) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def _export(net, path: Path) -> None:
    import torch

    torch.onnx.export(
        net,
        (torch.zeros(2, 3, SIDE, SIDE),),
        str(path),
        input_names=["images"],
        output_names=["output0"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
