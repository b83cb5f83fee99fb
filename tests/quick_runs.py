"""Tuning runs without what is not asked about, for tests that run many of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from neural_mp.adaptors.common.weights import adaround
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.api import job_builder, loading, replay
from neural_mp.core.enums import Objective
from neural_mp.core.op_timings import FULL_PROFILE, SHOWN_PROFILE, OpRuns, ProfileRuns
from neural_mp.profiling import estimate_uncontended_latency, measurement
from neural_mp.strategies import refinement
from neural_mp.tuning import unchecked
from neural_mp.tuning.final_selection import Selection
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measurement import objectives
from neural_mp.tuning.measurement.objectives import Measurement

#: Arguments → source and inputs, which must live as long as their ids, and the loaded model.
_loaded: dict[Any, tuple[Any, Any, AnyModel]] = {}


def load_once(source: Any, framework: Any, inputs: Any, **options: Any) -> AnyModel:
    """Return the model of a source as loaded first: models are never changed.

    Cached are torch modules, captured with the first data; and every object loaded without data.
    """
    torch = sys.modules.get("torch")  # not imported here: other processes do without it
    is_module = torch is not None and isinstance(source, torch.nn.Module) and inputs is None
    without_data = options.get("example") is None and not isinstance(source, str | Path)
    if not (is_module or without_data) or options.get("outputs"):
        return loading.load_source(source, framework, inputs, **options)
    settings = (str(options.get(name)) for name in ("capture", "trust"))
    key = (id(source), id(inputs), framework, *settings)
    if key not in _loaded:
        model = loading.load_source(source, framework, inputs, **options)
        _loaded[key] = source, inputs, model
    return _loaded[key][2]


#: Content and names of a graph → the ONNX file that it was exported to.
_exported: dict[Any, bytes] = {}


def export_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export a PyTorch graph for other runtimes once, whatever was captured how often."""
    from neural_mp.adaptors.pytorch.files import onnx_export, transfer
    from neural_mp.adaptors.pytorch.graph import graph_edit
    from neural_mp.adaptors.pytorch.graph.model import model_fingerprint

    def exported(model: Any, path: Path, metadata: Mapping[str, str]) -> None:
        names = [node.meta.get(graph_edit.OP_NAME) for node in model.portable_graph.graph.nodes]
        shapes = [getattr(leaf, "shape", leaf) for leaf in model.example.flatten_leaves()]
        key = (model_fingerprint(model), str((names, shapes, metadata)), onnx_export.name_nodes)
        if model.shell is not None or key not in _exported:
            onnx_export.export_onnx(model, path, metadata)
            _exported[key] = path.read_bytes()
        path.write_bytes(_exported[key])

    monkeypatch.setattr(transfer, "export_onnx", exported)


_measured_rounds = Measurement.measure_rounds
_measured_side_by_side = Measurement.side_by_side
#: Rounds after which a comparison of similar latencies ends without a decision.
_MOST_ROUNDS = 90
#: Latencies within this ratio are similar; others are compared until the decision, for at most so
#: many seconds: noise of a few rounds must not turn a clearly faster plan into an undecided one.
_SIMILAR_RATIO, _DECISION_SECONDS = 1.25, 10.0


def _in_three_rounds(measurement: Measurement) -> Measurement:
    """Return a measurement of as few rounds as there may be, whatever they take."""
    return replace(measurement, warmup=0, iterations=3, time_limit=0.0)


@dataclass(frozen=True)
class _Shown(Measurement):
    """Measures latencies that are shown and decide nothing."""


def _measured(
    self: Measurement,
    models: Sequence[AnyModel],
    longer: int = 1,
    earlier: Sequence[Sequence[float]] = (),
    is_patient: bool = True,
) -> list[list[float]]:
    if isinstance(self, _Shown):
        return _in_three_rounds(self).measure_interleaved(models)
    if Objective.PERFORMANCE not in self.objectives:
        self, longer = _in_three_rounds(self), 1
    return _measured_rounds(self, models, longer, earlier, is_patient)


def _side_by_side(self: Measurement, models: Sequence[AnyModel], longer: int = 1) -> list[float]:
    return _measured_side_by_side(self, models)


_unchecked = unchecked._measure_choice


def _decides_never(job: TuningJob, plan: Any) -> bool:
    return False


def _measured_unchecked(job: TuningJob, *arguments: Any) -> Selection:
    """Time a plan without accuracy check briefly, unless a test lets its time decide."""
    if unchecked.decides_by_time is _decides_never:
        values = {field.name: getattr(job.measurement, field.name) for field in fields(Measurement)}
        job = replace(job, measurement=_Shown(**values))
    return _unchecked(job, *arguments)


_interleaved_rounds = objectives.time_interleaved_rounds
#: Limits of one measurement; a decision between similar latencies has the same seconds.
_ROUNDS, _SECONDS = 6, 0.2


def _is_close(rounds: list[list[float]]) -> bool:
    """Whether a decision is given up, since two of the latencies hardly differ."""
    times = sorted(map(estimate_uncontended_latency, rounds))
    is_similar = any(b <= _SIMILAR_RATIO * a for a, b in pairwise(times))
    return is_similar and (len(rounds[0]) >= _MOST_ROUNDS or sum(map(sum, rounds)) >= _SECONDS)


def _rounds(runs: Sequence[Callable[[], Any]], **options: Any) -> list[list[float]]:
    """Time runs as the tuner does; without a decision to make, in few rounds.

    Seconds are those of the processor: on a busy machine, waiting decides otherwise.
    """
    options["time_limit"] = min(options["time_limit"], _SECONDS)
    decides = options.get("decides")
    if decides is None:
        options["warmup"] = min(options["warmup"], 1)
        options["iterations"] = min(options["iterations"], _ROUNDS)
    else:
        options["decides"] = lambda rounds: _is_close(rounds) or decides(rounds)
        options["patience"] = _DECISION_SECONDS / options["time_limit"]
    clocks = SimpleNamespace(perf_counter=time.process_time, process_time=time.process_time)
    with mock.patch.object(measurement, "time", clocks):
        return _interleaved_rounds(runs, **options)


_profile = LoadedModel.profile_ops


def _profiled(self: AnyModel, inputs: Any, runs: ProfileRuns = FULL_PROFILE) -> OpRuns:
    """Time ops in few runs, whether or not more are asked for."""
    return _profile(self, inputs, SHOWN_PROFILE)


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture a net once a session."""
    monkeypatch.setattr(job_builder, "load_source", load_once)


def measure_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure latencies no longer than their number needs; thrice if speed is no objective.

    Other runtimes are timed only where a test asks for that, and without an accuracy check, time
    decides only there.
    """
    monkeypatch.setattr(objectives, "_LEAST_SECONDS", 0.01)
    monkeypatch.setattr(Listener, "wants_hints", False)
    monkeypatch.setattr(unchecked, "decides_by_time", _decides_never)
    monkeypatch.setattr(unchecked, "_measure_choice", _measured_unchecked)
    monkeypatch.setattr(replay, "Measurement", _Shown)
    monkeypatch.setattr(Measurement, "side_by_side", _side_by_side)
    monkeypatch.setattr(objectives, "time_interleaved_rounds", _rounds)
    monkeypatch.setattr(objectives, "measure_cpu_share", lambda: 1.0)
    monkeypatch.setattr(Measurement, "measure_rounds", _measured)
    monkeypatch.setattr(LoadedModel, "profile_ops", _profiled)


def search_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure two neighbours of a plan in one round, in place of six in up to four.

    Roundings are learned in a fifth of the steps. For tests of what a user writes, who gets a plan:
    its last percent of speed is not asked about.
    """
    monkeypatch.setattr(refinement, "_NEIGHBOURS", 2)
    monkeypatch.setattr(refinement, "_MAX_ROUNDS", 1)
    monkeypatch.setattr(adaround, "_STEPS_PER_STEP", 1)


def decide_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """End comparisons of similar latencies after a tenth of a second."""
    monkeypatch.setattr(sys.modules[__name__], "_MOST_ROUNDS", 20)
    monkeypatch.setattr(sys.modules[__name__], "_SECONDS", 0.1)


def trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the variables of an optimizer before Keras fits a model.

    Keras creates them in the first step, which TensorFlow then traces twice.
    """
    keras = sys.modules.get("keras")
    if keras is None or keras.backend.backend() != "tensorflow":
        return
    fit = keras.Model.fit

    def fitted(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.built and self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        return fit(self, *arguments, **options)

    monkeypatch.setattr(keras.Model, "fit", fitted)
