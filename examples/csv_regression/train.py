"""A table and a net for it: how far diabetes has come after a year, from ten measurements."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn

OUT = Path(__file__).parent / "out"


class DiabetesNet(nn.Module):
    """Predicts one number for each row; input float32 [batch, 10], output float32 [batch].

    Args:
        typical: the mean and the standard deviation of the numbers to predict. The net learns
            how many deviations a row is from the mean, which no start has far to go to.
    """

    def __init__(self, typical: tuple[float, float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(10, 256), nn.ReLU()),
            *(nn.Linear(256, 256), nn.ReLU()),
            nn.Linear(256, 1),
        )
        self.mean, self.deviation = typical

    def forward(self, measurements: torch.Tensor) -> torch.Tensor:
        return self.layers(measurements).flatten() * self.deviation + self.mean


def write_tables() -> None:
    """Write `train.csv` and `test.csv`: a column for each measurement, and `progression`."""
    data = load_diabetes()
    order = np.random.default_rng(0).permutation(len(data.target))
    for name, rows in {"train": order[:342], "test": order[342:]}.items():
        with (OUT / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow([*data.feature_names, "progression"])
            table.writerows([*data.data[row], data.target[row]] for row in rows)


def read_table(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Measurements float32 [rows, 10], and what is to be predicted, float32 [rows]."""
    values = np.loadtxt(OUT / f"{name}.csv", delimiter=",", skiprows=1, dtype=np.float32)
    return torch.from_numpy(values[:, :-1]), torch.from_numpy(values[:, -1])


def train() -> DiabetesNet:
    """The net after twenty passes over the table, at a rate that falls to zero."""
    torch.manual_seed(0)
    measurements, progression = read_table("train")
    net = DiabetesNet((progression.mean().item(), progression.std().item()))
    epochs, batch_size = 20, 32
    steps = epochs * math.ceil(len(progression) / batch_size)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(progression)).split(batch_size):
            loss = F.mse_loss(net(measurements[batch]), progression[batch]) / net.deviation**2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def main() -> None:
    OUT.mkdir(exist_ok=True)
    write_tables()
    net = train()
    measurements, progression = read_table("test")
    with torch.no_grad():
        error = F.mse_loss(net(measurements), progression).sqrt().item()
    # The file fits batches of any size.
    sizes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(net, (torch.zeros(2, 10),), dynamic_shapes=sizes)
    torch.export.save(program, OUT / "diabetes_net.pt2")
    print(f"RMSE {error:.2f} on {len(progression)} rows that were not trained on")
    print(f"saved to {OUT.name}/diabetes_net.pt2")


if __name__ == "__main__":
    main()
