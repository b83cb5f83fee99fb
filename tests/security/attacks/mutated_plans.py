"""Plan files, with what calibration saw, with one thing changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from attacks.mutants import broken, lines_broken, mutants

from neural_mp.core.observations import ChannelStats, Observations
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec

_PLAN = "plan.yaml"
_OF_LINES, _OF_BYTES = 0.2, 0.2


def prepare(folder: Path) -> None:
    """Write a plan with all that one can hold."""
    weight = QuantSpec.parse("int8 symmetric per_channel")
    tensor = QuantSpec.parse("uint8 asymmetric per_tensor kl")
    plan = PrecisionPlan(
        {
            "conv": OpConfig(Precision.INT8, weight, tensor, ("equalize", "bias_correction")),
            "head": OpConfig(Precision.INT8, weight),
            "add": OpConfig(Precision.BF16),
            "mean": FP32,
        }
    )
    observations = Observations(
        {name: {"minmax": (-1.5, 2.0), "kl": (-1.0, 1.5)} for name in ("x", "conv")},
        {"x": 0.01, "conv": 0.5},
        100,
        {"conv": ChannelStats((0.0, -1.0), (1.0, 2.0), (0.5, 0.25), (0.1, 0.2))},
        {"conv": {"smooth": 0.1}},
        {"x": 64.0, "conv": 256.0},
    )
    plan.save(folder / _PLAN, framework="pytorch", observations=observations)


def attacks(
    folder: Path, scratch: Path, seed: int, count: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call of each attack."""
    text = (folder / _PLAN).read_text(encoding="utf-8")
    drawn = random.Random(f"plans {seed}")
    values, lines = round(count * (1 - _OF_LINES - _OF_BYTES)), round(count * _OF_LINES)
    trees = mutants(yaml.safe_load(text), f"plans {seed}", count)
    path = scratch / _PLAN
    for number in range(count):
        if number < values:
            case, tree = next(trees)
            yield case, _call(path, _dumped(tree))
        elif number < values + lines:
            case, changed = lines_broken(text, drawn)
            yield case, _call(path, changed.encode("utf-8", "replace"))
        else:
            case, data = broken(text.encode(), drawn)
            yield case, _call(path, data)


def _dumped(tree: Any) -> bytes:
    return str(yaml.safe_dump(tree, sort_keys=False)).encode()


def _call(path: Path, data: bytes) -> Callable[[], object]:
    def call() -> None:
        path.write_bytes(data)
        plan, observations = load_plan_file(path)
        again = PrecisionPlan.from_yaml(plan.to_yaml(observations=observations))
        assert again == plan, f"{again} is not {plan}"

    return call
