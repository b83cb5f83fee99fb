"""Every ready-made tuning file runs as it stands, on real data at the paths it names."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import nn
from torch.nn import functional as F

from neural_mp import MixedPrecision

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

CONF = Path(__file__).parent.parent / "conf"
FILES = sorted(file.name for file in CONF.glob("*.yaml"))


def fit(model, inputs, targets, loss, steps=200):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    inputs, targets = torch.from_numpy(inputs), torch.from_numpy(targets)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return model.eval()


def write_arrays(digits):
    Path("data").mkdir()
    for name, split in zip(("train", "test"), digits, strict=True):
        np.savez(f"data/{name}.npz", inputs=split.images, labels=split.labels)


def write_tables(features, targets, heading):
    Path("data").mkdir()
    cut = len(targets) * 2 // 3
    for name, rows in (("train", slice(0, cut)), ("test", slice(cut, None))):
        with Path(f"data/{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*(f"x{index}" for index in range(features.shape[1])), heading])
            writer.writerows(
                [*row, target]
                for row, target in zip(features[rows].tolist(), targets[rows].tolist(), strict=True)
            )
    return features[:cut], targets[:cut]


def arrays(net, digits):
    write_arrays(digits)
    return net


def dense(features, outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, outputs))


def diabetes(net, digits):
    data = load_diabetes()
    features = (data.data / data.data.std(0)).astype(np.float32)
    targets = (data.target / data.target.std()).astype(np.float32)
    inputs, expected = write_tables(features, targets, "target")
    return fit(dense(features.shape[1], 1), inputs, expected[:, None], F.mse_loss)


def tumours(net, digits):
    data = load_breast_cancer()
    features = (data.data - data.data.mean(0)) / data.data.std(0)
    inputs, expected = write_tables(
        features.astype(np.float32), data.target.astype(np.int64), "label"
    )
    return fit(dense(features.shape[1], 2), inputs, expected, F.cross_entropy)


def pictures(net, digits):
    image = pytest.importorskip("PIL.Image")
    for name, split, count in (("train", digits[0], 60), ("val", digits[1], 100)):
        for index in range(count):
            folder = Path("data", name, str(split.labels[index]))
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (split.images[index, 0] * 255).astype(np.uint8)
            image.fromarray(pixels).resize((64, 64)).convert("RGB").save(folder / f"{index}.png")
    return AsDigits(net).eval()


class AsDigits(nn.Module):
    """The digits net, fed with normalized pictures [batch, 3, 224, 224]."""

    def __init__(self, net):
        super().__init__()
        self.shrink = nn.Conv2d(3, 1, 28, stride=28)
        std = torch.tensor([0.229, 0.224, 0.225])
        with torch.no_grad():
            self.shrink.weight.copy_(std[None, :, None, None].expand(1, 3, 28, 28) / (3 * 28 * 28))
            self.shrink.bias.fill_((0.485 + 0.456 + 0.406) / 3)
        self.net = net

    def forward(self, x):
        return self.net(self.shrink(x))


RECIPES = {
    "array_classification.yaml": arrays,
    "bf16_only.yaml": arrays,
    "binary_classification.yaml": tumours,
    "image_classification.yaml": pictures,
    "keep_layers.yaml": arrays,
    "regression.yaml": diabetes,
    "smallest.yaml": arrays,
    "speed_only.yaml": arrays,
}


@pytest.mark.parametrize("name", FILES)
def test_a_ready_made_file_gives_a_usable_model(name, net, digits, monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    model = RECIPES[name](net, digits)

    converter = MixedPrecision(CONF / name)
    converter.model = model
    converter.objective = "modelsize"  # models this small need not be faster
    result = converter()

    used = {config.precision.value for config in result.plan.values()}
    if name == "speed_only.yaml":
        assert result.met is None
    else:
        assert result.met, result.report.warnings
        assert result.report.baseline_accuracy > (0.5 if name != "regression.yaml" else 0)
    assert used & ({"bf16"} if name == "bf16_only.yaml" else {"int8"})
    assert result.report.size < result.report.baseline_size
    if name == "keep_layers.yaml":
        assert {result.plan[op].precision.value for op in ("stem", "head")} == {"fp32"}


def test_every_file_is_listed():
    text = (CONF / "README.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"\]\((\w+\.yaml)\)", text))) == FILES


def test_no_recipe_is_left_over():
    assert sorted(RECIPES) == FILES
