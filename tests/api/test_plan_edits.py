"""The edit of one op in a plan file: what else changes is named with its reason, or refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from machine import machine
from onnx_nets import as_onnx
from quick_runs import give_nominal_times
from torch import nn

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.replay import convert_with_plan
from neural_mp.core.precision import Precision
from neural_mp.errors import PlanError
from neural_mp.runs.report import Report
from neural_mp.space import list_effective_ops
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8, FP32 = Precision.INT8, Precision.FP32
REPLAY = "neural_mp.api.replay"
IMAGES = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)


class Joined(nn.Module):
    """A concatenation of a convolution and of a sine, which no runtime computes in INT8."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem(x)
        joined = torch.cat([self.middle(stem).relu(), stem.sin()], 1)
        return self.head(self.last(joined).relu().mean((2, 3)))


def _joined_keras() -> Any:
    keras = pytest.importorskip("keras")

    def convolution(name: str, **options: Any) -> Any:
        return keras.layers.Conv2D(8, 3, padding="same", name=name, **options)

    image = keras.Input((8, 8, 1))
    stem = convolution("stem")(image)
    middle = convolution("middle", activation="relu")(stem)
    joined = keras.layers.Concatenate()([middle, keras.ops.sin(stem)])
    pooled = keras.layers.GlobalAveragePooling2D()(convolution("last", activation="relu")(joined))
    return keras.Model(image, keras.layers.Dense(10)(pooled))


@dataclass(frozen=True)
class Case:
    """A net with all its ops in INT8 that support INT8, and the names of two of its ops."""

    source: Any
    framework: str
    images: np.ndarray
    result: OptimizedModel
    convolution: str
    concatenation: str

    def replay(self, folder: Any, edits: dict[str, str], **options: Any) -> OptimizedModel:
        """Save the plan, edit the file as text, and convert the net by the file."""
        file = folder / "plan.yaml"
        self.result.save_plan(file)
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        content["ops"].update(edits)
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return convert_with_plan(
            self.source,
            file,
            inputs=self.images,
            framework=self.framework,
            hardware=machine(),
            **options,
        )


@cache
def _made_in(framework: str) -> Case:
    torch.manual_seed(0)
    images = IMAGES
    if framework == "tensorflow":
        source, images = _joined_keras(), IMAGES.transpose(0, 2, 3, 1)
    else:
        source = Joined().eval()
    if framework in ("onnxrt", "openvino"):
        source = as_onnx(source)
    if framework == "openvino":
        ov_nets = pytest.importorskip("ov_nets")
        source = ov_nets.read(source)
    adaptor = adaptor_for(source, framework)
    model = adaptor.load(source, example=images)
    space = adaptor.space(model, machine())
    observed = adaptor.observe(model, [images], space)
    resolved = space.resolve(uniform(space, INT8))
    result = OptimizedModel(
        LoadedModel(adaptor, adaptor.convert(model, resolved, observed, space)),
        resolved.plan,
        Report(),
        observations=observed,
        planned=list_effective_ops(space, resolved),
    )
    second = [op.name for op in space.contractions][1]
    joining = next(op.name for op in space.graph if "concat" in op.type.lower() or op.type == "cat")
    assert result.planned[joining].precision is INT8
    return Case(source, framework, images, result, second, joining)


@pytest.fixture(scope="module", params=["pytorch", "onnxrt", "openvino", "tensorflow"])
def case(request) -> Case:
    return _made_in(request.param)


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    give_nominal_times(monkeypatch)


def test_what_follows_an_edit_is_logged_and_reported_with_its_reason(case, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, REPLAY):
        replayed = case.replay(tmp_path, {case.convolution: "fp32"})
    assert replayed.planned[case.concatenation].precision is FP32
    (note,) = (note for note in replayed.report.warnings if f"{case.concatenation!r} runs" in note)
    assert note in caplog.messages
    assert "in fp32, in the plan in int8: " in note
    assert "no kernel writes " in note
    changed = {
        op
        for op, effective in replayed.planned.items()
        if effective.precision is not case.result.planned[op].precision
    }
    notes = " ".join(replayed.report.warnings)
    assert all(repr(op) in notes for op in changed - {case.convolution})
    assert replayed.audit().holds


def test_a_strict_replay_changes_only_what_the_edit_names(case, tmp_path):
    with pytest.raises(PlanError, match=f"{case.concatenation!r} runs in fp32.*without strict"):
        case.replay(tmp_path, {case.convolution: "fp32"}, strict=True)
    edits = {case.convolution: "fp32", case.concatenation: "fp32"}
    replayed = case.replay(tmp_path, edits, strict=True)
    assert case.concatenation not in " ".join(replayed.report.warnings)
    expected = np.asarray(case.result(case.images))
    assert signal_to_noise(expected, np.asarray(replayed(case.images))) > 20


def test_a_plan_that_is_replayed_as_written_departs_nowhere(case, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, REPLAY):
        replayed = case.replay(tmp_path, {}, strict=True)
    assert not [note for note in replayed.report.warnings if "plan" in note]
    assert not caplog.messages
    assert replayed.plan == case.result.plan
    assert replayed.plan.int8_followers == case.result.plan.int8_followers


def test_the_command_names_what_follows_an_edit_and_refuses_with_strict(run, tmp_path):
    case = _made_in("onnxrt")
    onnx.save(case.source, tmp_path / "net.onnx")
    case.replay(tmp_path, {case.convolution: "fp32"})
    arguments = ["convert", str(tmp_path / "net.onnx"), "--plan", str(tmp_path / "plan.yaml")]
    output = ["--output", str(tmp_path / "replayed"), "--input-shape", "8,1,8,8"]
    code, _, err = run(*arguments, *output, "--strict")
    assert code == 2
    assert f"{case.concatenation!r} runs in fp32" in err
    assert not (tmp_path / "replayed").exists()
    code, out, err = run(*arguments, *output)
    assert code == 0, err
    assert " ".join(out.split()).count(f"{case.concatenation!r} runs in fp32") == 1
    assert case.concatenation not in err
    code, _, err = run("audit", *arguments[1:], *output[2:])
    assert code == 0
    assert f"{case.concatenation!r} runs in fp32" in err
