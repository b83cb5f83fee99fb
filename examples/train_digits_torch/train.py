"""Train in float16: find the module that must stay in float32, and leave it there."""

from __future__ import annotations

from pathlib import Path

import torch
from digits import Digits, digits_net
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from neural_mp.training import GradScaler, advise, apply_plan, autocast, first_nonfinite

OUT = Path(__file__).parent / "out"
BATCHES = DataLoader(Digits("train"), batch_size=64)
TEST = Digits("test")


def trained(net: nn.Module, context=None) -> tuple[float, GradScaler]:
    """The accuracy of a net on the test split, after three epochs, and the scaler of its loss."""
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    scaler = GradScaler("cpu")
    for _ in range(3):
        for images, labels in BATCHES:
            optimizer.zero_grad()
            with context or torch.enable_grad():
                loss = cross_entropy(net(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    with torch.no_grad():
        right = net(torch.from_numpy(TEST.images)).argmax(1) == torch.from_numpy(TEST.labels)
    return float(right.float().mean()), scaler


def main() -> None:
    print(f"float32: accuracy {trained(digits_net())[0]:.3f}")

    low = torch.autocast("cpu", torch.float16)
    accuracy, scaler = trained(digits_net(), low)
    steps = f"{scaler.skipped_steps} of {3 * len(BATCHES)} steps skipped"
    print(f"\ntorch.autocast in float16: accuracy {accuracy:.3f}, {steps}")
    with low:
        print(first_nonfinite(digits_net(), next(iter(BATCHES)), cross_entropy))

    # The four lists know that sums overflow float16.
    accuracy, scaler = trained(digits_net(), autocast("fp16"))
    print(f"\nby the four lists: accuracy {accuracy:.3f}, skipped steps {scaler.skipped_steps}\n")

    # Or keep the module that does harm, and no other.
    advice = advise(digits_net(), BATCHES, cross_entropy, "fp16")
    Console().print(advice.table)
    for warning in advice.warnings:
        print(f"warning: {warning}")
    OUT.mkdir(exist_ok=True)
    advice.save_plan(OUT / "plan.yaml")
    accuracy, scaler = trained(apply_plan(digits_net(), OUT / "plan.yaml"))
    print(f"\nas advised: accuracy {accuracy:.3f}, skipped steps {scaler.skipped_steps}")


if __name__ == "__main__":
    main()
