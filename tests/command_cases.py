"""Every command on a model file and on the tuned result, for adaptors of graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_here import run_main
from quick_runs import give_nominal_times

import neural_mp

CONF = """
model: {{name: {file}, runtime: source}}
mixed_precision: {{precisions: int8}}
quantization:
  calibration: {{dataloader: {{batch_size: 50, dataset: {{numpy: {{path: train.npz}}}}}}}}
evaluation:
  accuracy:
    metric: accuracy
    dataloader: {{batch_size: 100, dataset: {{numpy: {{path: test.npz}}}}}}
tuning: {{objective: modelsize}}  # so small a net need not be faster in INT8
"""


class CommandCases:
    """All commands that read a model; subclasses define `file`, a trained digits net on disk."""

    #: Op type of a convolution.
    convolution: str

    @pytest.fixture(scope="class")
    @classmethod
    def file(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The net as a file in a folder of its own: [batch, 1, 8, 8] → 10 logits."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def tuned(cls, file, digits) -> Path:
        """The net's folder with its tuned result in `tuned`."""
        for name, split in zip(("train", "test"), digits, strict=True):
            images, labels = split.images[:300], split.labels[:300]
            np.savez(file.parent / f"{name}.npz", inputs=images, labels=labels)
        np.save(file.parent / "images.npy", digits[1].images[:64])
        (file.parent / "conf.yaml").write_text(CONF.format(file=file.name))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(file.parent)
            give_nominal_times(patch)
            code, _, err = run_main("tune", "conf.yaml", "--output", "tuned")
        assert code == 0, err
        return file.parent

    @pytest.fixture
    def ask(self, tuned, file, monkeypatch):
        """Function: a command on the net or on `tuned` → its document."""
        monkeypatch.chdir(tuned)

        def call(command: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> Any:
            code, out, err = run_main(command, *arguments, "--json")
            assert code in codes, err
            return json.loads(out)

        return call

    def _layer(self, ask, file) -> str:
        rows = ask("inspect", file.name)
        return next(row["name"] for row in rows if row["type"] == self.convolution)

    def test_resuming_a_finished_run_evaluates_nothing(self, ask):
        document = ask("tune", "conf.yaml", "--resume")
        assert document["met"]
        assert document["report"]["evaluations"] == 0

    def test_inspect_and_explain_show_the_same_precisions(self, ask, file):
        rows = {row["name"]: row for row in ask("inspect", file.name)}
        layers = [row for row in rows.values() if row["type"] == self.convolution]
        assert len(layers) == 6
        assert all("int8" in row["precisions"] for row in layers)
        assert ask("explain", file.name, layers[1]["name"])["precisions"]["int8"]["decision"] == (
            "int8"
        )
        assert {row["name"] for row in layers} <= set(ask("inspect", "tuned")["plan"])

    def test_audit_finds_the_integer_kernels_of_the_plan(self, ask):
        # ONNX Runtime may run further ops in INT8, which ends in 1.
        document = ask("audit", "tuned", "--all", codes=(0, 1))
        assert document["complete"]
        layers = [op for op in document["ops"] if op["type"] == self.convolution]
        assert [op["ran_in"] for op in layers] == ["int8"] * 6

    def test_compare_has_the_noise_of_int8(self, ask, file):
        document = ask("compare", file.name, "tuned", "--data", "images.npy")
        (output,) = document["outputs"]
        assert 25 < output["sqnr"] < 60
        assert document["samples"] == 64
        assert len(document["layers"]) >= 6
        assert document["first"]

    def test_sensitivity_measures_every_decision(self, ask, file):
        decisions = ask("sensitivity", file.name, "--data", "images.npy")["decisions"]
        assert len(decisions) >= 4
        assert all(0 <= decision["output_noise"] < 1 for decision in decisions)
        assert any(decision["output_noise"] for decision in decisions)
        assert any(decision["seconds_gained"] for decision in decisions)

    def test_report_is_a_page_with_every_layer(self, ask, file):
        assert ask("report", "neural_mp_workspace")["met"]
        code, out, err = run_main("report", "neural_mp_workspace")
        assert code == 0, err
        page = Path(out.split("page saved to ")[1].strip()).read_text()
        assert self._layer(ask, file) in page

    def test_benchmark_times_both(self, ask, file):
        full, tuned = ask("benchmark", file.name, "tuned")["models"]
        assert full["speed"] == 1
        assert tuned["speed_low"] <= tuned["speed"] <= tuned["speed_high"]
        assert tuned["size"] < 0.4 * full["size"]

    def test_convert_replays_the_plan_and_makes_it_portable(self, ask, file, digits):
        plan = ("--plan", "tuned/plan.yaml", "--output")
        ask("convert", file.name, *plan, "replayed")
        assert ask("inspect", "replayed")["plan"] == ask("inspect", "tuned")["plan"]
        document = ask("convert", file.name, *plan, "portable", "--target", "portable")
        assert document["exact_on"] == "every CPU"
        images = digits[1].images
        expected = neural_mp.load("tuned")(images).argmax(1)
        for folder in ("replayed", "portable"):
            assert (neural_mp.load(folder)(images).argmax(1) == expected).mean() > 0.97
