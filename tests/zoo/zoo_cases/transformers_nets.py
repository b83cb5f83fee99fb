"""One tiny random model of every architecture that `transformers` maps to a base model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES

from zoo_cases.case import NotBuiltError, ZooCase
from zoo_cases.model_inputs import Inputs, input_candidates
from zoo_cases.shrinking import SHRINKINGS, Shrinking, shrunk

#: Parameters that a tiny instance may have.
MAX_PARAMETERS = 40_000_000
#: Seconds after which no further way is tried, and seconds of one forward.
MAX_BUILD_SECONDS, MAX_FORWARD_SECONDS = 15.0, 5.0


def names() -> list[str]:
    """Return all model types."""
    return sorted(MODEL_MAPPING_NAMES)


def build_warm_up() -> ZooCase:
    """Return a common model, after building another that imports more."""
    transformers.logging.set_verbosity_error()
    build("clip", 0, 1)
    return build("bert", 0, 1)


def build(
    name: str, seed: int, batches: int, folder: Path | None = None, classes: Any = MODEL_MAPPING
) -> ZooCase:
    """Return a tiny model of a type, in the class that a mapping has for its configuration.

    Raises:
        NotBuiltError: no way of shrinking gives a model that runs.
    """
    reasons: list[str] = []
    end = time.process_time() + MAX_BUILD_SECONDS
    for shrinking, model in _models(name, seed, reasons, classes):
        kind = _running_kind(model, seed, reasons, shrinking)
        if kind is not None:
            repeated = [dict(input_candidates(model, seed + 1 + i))[kind] for i in range(batches)]
            return ZooCase(model, repeated, _runner(model), f"{shrinking.name}; {kind}")
        if time.process_time() > end:
            break
    raise NotBuiltError("; ".join(dict.fromkeys(reasons)) or "no model class")


def _models(
    name: str, seed: int, reasons: list[str], classes: Any
) -> Iterator[tuple[Shrinking, nn.Module]]:
    kind: Any = CONFIG_MAPPING[name]
    for shrinking in SHRINKINGS:
        try:
            config = kind(**shrunk(kind(), shrinking))
            architecture = classes[kind]
            if isinstance(architecture, tuple):
                architecture = architecture[0]
            with torch.device("meta"):
                count = sum(p.numel() for p in architecture(config).parameters())
            if count > MAX_PARAMETERS:
                reasons.append(f"{shrinking.name}: {count / 1e6:.0f} million parameters")
                continue
            torch.manual_seed(seed)
            model = architecture(config).eval()
        except Exception as error:  # noqa: BLE001 - configurations check their values with any type
            reasons.append(f"{shrinking.name}: {_line(error)}")
            continue
        yield shrinking, model
        if getattr(config, "use_cache", False):
            # A stack cut to layers without attention has no cache of keys and values.
            config.use_cache = False
            yield replace(shrinking, name=f"{shrinking.name}, no cache"), model


def _running_kind(
    model: nn.Module, seed: int, reasons: list[str], shrinking: Shrinking
) -> str | None:
    """Return the first kind of inputs that a model runs on."""
    for kind, inputs in input_candidates(model, seed):
        try:
            with torch.no_grad():
                begun = time.process_time()
                model(**inputs)
                if time.process_time() - begun > MAX_FORWARD_SECONDS:
                    reasons.append(f"{shrinking.name}: a forward takes too long")
                    return None
        except Exception as error:  # noqa: BLE001 - models raise any type for unsuitable inputs
            reasons.append(f"{shrinking.name}, {kind}: {_line(error)}")
            continue
        return kind
    return None


def _runner(model: nn.Module) -> Callable[[Inputs], Any]:
    def run(inputs: Inputs) -> Any:
        with torch.no_grad():
            return model(**{name: value.clone() for name, value in inputs.items()})

    return run


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
