"""Tuning runs without what is not asked about, for tests that run many of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from child_processes.nominal_times import REPLACED

from neural_mp.adaptors.common.weights import adaround
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.api import job_builder, loading
from neural_mp.core.op_timings import FULL_PROFILE, SHOWN_PROFILE, OpRuns, ProfileRuns
from neural_mp.strategies import refinement
from neural_mp.tuning import unchecked
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measurement import objectives

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


#: Content and names of a graph → the files that it was exported to, by name.
_exported: dict[Any, dict[str, bytes]] = {}


def export_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export a PyTorch graph for other runtimes once, whatever was captured how often."""
    from neural_mp.adaptors.pytorch.files import onnx_export, transfer
    from neural_mp.adaptors.pytorch.graph import graph_edit
    from neural_mp.adaptors.pytorch.graph.model import model_fingerprint

    def exported(model: Any, path: Path, metadata: Mapping[str, str], **options: Any) -> None:
        names = [node.meta.get(graph_edit.OP_NAME) for node in model.portable_graph.graph.nodes]
        shapes = [getattr(leaf, "shape", leaf) for leaf in model.example.flatten_leaves()]
        key = (model_fingerprint(model), str((names, shapes, metadata)), onnx_export.name_nodes)
        if model.shell is not None or key not in _exported:
            onnx_export.export_onnx(model, path, metadata, **options)
            _exported[key] = {file.name: file.read_bytes() for file in path.parent.iterdir()}
        for name, content in _exported[key].items():
            path.with_name(name).write_bytes(content)

    monkeypatch.setattr(transfer, "export_onnx", exported)


def decides_never(job: TuningJob, plan: Any) -> bool:
    """Whether time decides on a plan without accuracy check: not unless a test asks for that."""
    return False


#: Module and name of what is replaced → the original.
_originals: dict[tuple[str, str], Any] = {}
_profile = LoadedModel.profile_ops


def _profiled(self: AnyModel, inputs: Any, runs: ProfileRuns = FULL_PROFILE) -> OpRuns:
    """Time ops in few runs, whether or not more are asked for."""
    return _profile(self, inputs, SHOWN_PROFILE)


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture a net once a session."""
    monkeypatch.setattr(job_builder, "load_source", load_once)


def give_nominal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give models and ops the times that follow from what they are, in place of measured ones.

    Other runtimes are timed only where a test asks for that, and without an accuracy check, time
    decides only there. What is timed after all, by a clock of its own, is timed briefly.
    """
    for path, replacements in REPLACED.items():
        if ".pytorch." in path and "torch" not in sys.modules:
            continue
        module = import_module(path)
        for name, make_replacement in replacements.items():
            original = _originals.setdefault((path, name), getattr(module, name))
            monkeypatch.setattr(module, name, make_replacement(original))
    monkeypatch.setattr(objectives, "_LEAST_SECONDS", 0.01)
    monkeypatch.setattr(objectives, "measure_cpu_share", lambda: 1.0)
    monkeypatch.setattr(Listener, "wants_hints", False)
    monkeypatch.setattr(unchecked, "decides_by_time", decides_never)
    monkeypatch.setattr(LoadedModel, "profile_ops", _profiled)


def search_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure two neighbours of a plan in one round, in place of six in up to four.

    Roundings are learned in a fifth of the steps. For tests of what a user writes, who gets a plan:
    its last percent of speed is not asked about.
    """
    monkeypatch.setattr(refinement, "_NEIGHBOURS", 2)
    monkeypatch.setattr(refinement, "_MAX_ROUNDS", 1)
    monkeypatch.setattr(adaround, "_STEPS_PER_STEP", 1)


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
