"""Train in float16: find the layer that must stay in float32, before and while it breaks."""

from __future__ import annotations

from pathlib import Path

import keras
from digits import LOSS, Digits, digits_net
from rich.console import Console

from neural_mp import PrecisionPlan, common
from neural_mp.errors import TrainingError
from neural_mp.training import LossScaleOptimizer, Watch, advise, apply_plan

OUT = Path(__file__).parent / "out"
TRAIN, TEST = Digits("train"), Digits("test")


def trained(net: keras.Model, *callbacks: keras.callbacks.Callback) -> float:
    """The accuracy of a net on the test split, after three epochs."""
    net.compile(LossScaleOptimizer(keras.optimizers.Adam(2e-3)), LOSS, metrics=["accuracy"])
    net.fit(TRAIN.images, TRAIN.labels, 64, epochs=3, verbose=0, callbacks=[*callbacks])
    return net.evaluate(TEST.images, TEST.labels, verbose=0)[1]


def main() -> None:
    print(f"float32: accuracy {trained(digits_net()):.3f}")

    # What people do first: everything in float16, but for the outputs.
    inner = [layer.name for layer in digits_net().layers[1:-1]]
    everything = PrecisionPlan.from_dict(dict.fromkeys(inner, "fp16"))
    try:
        trained(apply_plan(digits_net(), everything), Watch(patience=20))
    except TrainingError as error:
        print(f"\nall in float16: {error}\n")

    # What finds the layer beforehand.
    batches = common.DataLoader(TRAIN, batch_size=64)
    advice = advise(digits_net(), batches, LOSS, "fp16")
    Console().print(advice.table)
    for warning in advice.warnings:
        print(f"warning: {warning}")
    OUT.mkdir(exist_ok=True)
    advice.save_plan(OUT / "plan.yaml")

    net = apply_plan(digits_net(), OUT / "plan.yaml")
    print(f"\nas advised: accuracy {trained(net):.3f}, skipped steps {net.optimizer.skipped_steps}")


if __name__ == "__main__":
    main()
