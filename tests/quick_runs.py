"""Tuning runs without what is not asked about, for tests that run many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api import job_builder, loading
from neural_mp.core.enums import Objective
from neural_mp.tuning import objectives
from neural_mp.tuning.objectives import Measurement

#: What was asked for → the object that was given, which must live as long as its number, and the
#: model.
_captured: dict[Any, tuple[Any, AnyModel]] = {}


def load_once(source: Any, framework: Any, inputs: Any, **options: Any) -> AnyModel:
    """The model of a torch module as it was captured first: models are never changed."""
    if not isinstance(source, nn.Module) or inputs is not None or options.get("outputs"):
        return loading.load_source(source, framework, inputs, **options)
    key = id(source), framework, str(options.get("capture"))
    if key not in _captured:
        _captured[key] = source, loading.load_source(source, framework, inputs, **options)
    return _captured[key][1]


_measured_rounds = Measurement.rounds


def _rounds(self: Measurement, models: Sequence[AnyModel], longer: int = 1) -> list[list[float]]:
    if Objective.PERFORMANCE not in self.objectives:
        self, longer = replace(self, warmup=0, iterations=3), 1
    return _measured_rounds(self, models, longer)


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture a net once a session."""
    monkeypatch.setattr(job_builder, "load_source", load_once)


def measure_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure latencies no longer than their number needs; thrice if speed is no objective."""
    monkeypatch.setattr(objectives, "_LEAST_SECONDS", 0.01)
    monkeypatch.setattr(objectives, "_PATIENCE", 1.0)
    monkeypatch.setattr(Measurement, "rounds", _rounds)
