"""Contract of models converted for one CPU and loaded on another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.replay import convert_with_plan
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError, ModelLoadError
from neural_mp.runs.report import Report
from neural_mp.testing.fixtures import Split, machine, signal_to_noise, uniform
from neural_mp.testing.on_digits import OnDigits

INT8 = Precision.INT8

#: Minimum SQNR in dB of a small net in INT8 with weights of ±63; below 10 dB if saturated.
LEAST = 25
_LOADED = """
import json, sys
import numpy as np
import neural_mp
images, *folders = sys.argv[1:]
for folder in folders:
    result = neural_mp.load(folder)
    outputs = np.asarray(result(np.load(images)))
    print(json.dumps({"outputs": outputs.tolist(), "warnings": list(result.report.warnings)}))
"""


@dataclass(frozen=True)
class Made:
    """Net converted for a target, with FP32 reference outputs."""

    result: OptimizedModel
    images: np.ndarray
    reference: np.ndarray


@dataclass(frozen=True)
class LoadedElsewhere:
    """Outputs and warnings of a saved model in another process."""

    outputs: np.ndarray
    warnings: list[str]


def loaded_here(folders: Sequence[Path], images: np.ndarray) -> list[LoadedElsewhere]:
    """Load saved models in this process; return what each computed."""
    results = [neural_mp.load(folder) for folder in folders]
    return [
        LoadedElsewhere(np.asarray(result(images), np.float32), list(result.report.warnings))
        for result in results
    ]


def loaded_under(
    limit: str | None, folders: Sequence[Path], images: np.ndarray
) -> list[LoadedElsewhere]:
    """Load saved models in one process with a oneDNN ISA limit; return what each computed."""
    np.save(folders[0].parent / "images.npy", images)
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    if limit is not None:
        environment["ONEDNN_MAX_CPU_ISA"] = limit
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, str(folders[0].parent / "images.npy"), *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (line for line in done.stdout.splitlines() if line.startswith('{"outputs": '))
    records = map(json.loads, lines)
    return [LoadedElsewhere(np.array(x["outputs"], np.float32), x["warnings"]) for x in records]


def make(net: Any, split: tuple[Split, Split], target: str) -> Made:
    """Convert a net for a target, without a check that the target is exact here."""
    images = split[1].images[:60]
    adaptor = adaptor_for(net)
    model = adaptor.load(net, example=images)
    # The adaptor is called directly, since the API refuses targets that cannot be checked here.
    space = adaptor.space(model, machine().for_target(target))
    observed = adaptor.observe(model, [split[0].images[:100]], space)
    plan = space.resolve(uniform(space, INT8))
    converted = adaptor.convert(model, plan, observed, space)
    result = OptimizedModel(
        LoadedModel(adaptor, converted), plan.plan, Report(), observations=observed
    )
    return Made(result, images, np.asarray(adaptor.predict(model, images)))


class DeploymentContract(OnDigits):
    """Contract of an adaptor with `portability`; subclasses define a net trained on digits."""

    #: Whether `ONEDNN_MAX_CPU_ISA` makes the runtime behave like an older CPU.
    heeds_onednn = True

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls) -> Any:
        """The net: [batch, 1, 8, 8] or flattened."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def made_for(cls, net: Any, digits: tuple[Split, Split]) -> Callable[[str], Made]:
        """Function from a target to the net converted for the target, which must not be changed."""
        return cache(lambda target: make(net, digits, target))

    @pytest.fixture(scope="class")
    @classmethod
    def loaded_elsewhere(
        cls, made_for: Callable[[str], Made], tmp_path_factory: pytest.TempPathFactory
    ) -> Callable[[str | None], Mapping[str, LoadedElsewhere]]:
        """Function from a oneDNN ISA limit to what the models for each target compute under it."""
        folder = tmp_path_factory.mktemp("saved")
        targets = ("vnni", "portable")
        for target in targets:
            made_for(target).result.save(folder / target)
        images = made_for("portable").images

        def load_under_limit(limit: str | None) -> Mapping[str, LoadedElsewhere]:
            folders = [folder / target for target in targets]
            # The limit is read when a process starts, by runtimes that heed it at all.
            in_process = not cls.heeds_onednn or limit == os.environ.get("ONEDNN_MAX_CPU_ISA")
            loaded = (
                loaded_here(folders, images) if in_process else loaded_under(limit, folders, images)
            )
            return dict(zip(targets, loaded, strict=True))

        return cache(load_under_limit)

    @pytest.mark.parametrize("limit", ["AVX2", None])
    def test_a_model_made_for_exact_products_is_right_wherever_it_is_loaded(
        self, made_for, loaded_elsewhere, limit
    ):
        deployed = made_for("vnni")
        assert "VNNI" in deployed.result.exact_on
        assert "portable" in deployed.result.exact_on
        loaded = loaded_elsewhere(limit)["vnni"]
        assert signal_to_noise(deployed.reference, loaded.outputs) > LEAST
        if limit and self.heeds_onednn:
            (warning,) = loaded.warnings
            assert "saturate" in warning

    @pytest.mark.parametrize("limit", ["AVX2", None])
    def test_a_portable_model_is_right_everywhere_as_it_is(self, made_for, loaded_elsewhere, limit):
        deployed = made_for("portable")
        assert deployed.result.exact_on == "every CPU"
        loaded = loaded_elsewhere(limit)["portable"]
        assert signal_to_noise(deployed.reference, loaded.outputs) > LEAST
        assert loaded.warnings == []

    def test_what_cannot_be_made_exact_is_refused_with_the_reason_and_the_fix(
        self, made_for, tmp_path, monkeypatch
    ):
        deployed = made_for("vnni")
        deployed.result.save(tmp_path / "saved")
        kind = type(deployed.result.adaptor)
        accumulation = dict.fromkeys(KernelKind, Int8Accumulation.SATURATING)
        monkeypatch.setattr(kind, "int8_accumulation", lambda self, hardware: accumulation)
        refusal = Mock(side_effect=ConversionError("its weights are not known"))
        offered = replace(kind.portability, with_reduced_range=refusal)
        monkeypatch.setattr(kind, "portability", offered)
        with pytest.raises(ModelLoadError, match=r"saturate.*weights are not known.*'portable'"):
            neural_mp.load(tmp_path / "saved")

    def test_the_api_converts_for_a_target_and_reports_it(self, net, digits, tmp_path):
        converter = MixedPrecision()
        converter.model, converter.precisions = net, "int8"
        converter.target = "portable"
        converter.calib_dataloader = digits[0].loader()
        result = converter()
        specs = [str(c.weight) for c in result.plan.values() if c.approach == "static" and c.weight]
        assert specs
        assert sum("reduced_range" in spec for spec in specs) >= len(specs) - 2  # except depthwise
        assert result.exact_on == "every CPU"

    def test_a_plan_of_another_machine_is_replayed_with_weights_that_are_right(
        self, net, made_for, tmp_path
    ):
        deployed = made_for("vnni")
        deployed.result.save_plan(tmp_path / "plan.yaml")
        replayed = convert_with_plan(
            net, tmp_path / "plan.yaml", inputs=(deployed.images,), target="portable"
        )
        (warning,) = replayed.report.warnings
        assert "another range" in warning
        assert replayed.exact_on == "every CPU"
        assert signal_to_noise(deployed.reference, np.asarray(replayed(deployed.images))) > LEAST

    def test_a_plan_with_reduced_weights_replays_as_it_says_on_every_machine(
        self, net, made_for, tmp_path
    ):
        deployed = made_for("portable")
        deployed.result.save_plan(tmp_path / "plan.yaml")
        replayed = convert_with_plan(net, tmp_path / "plan.yaml", inputs=(deployed.images,))
        assert replayed.report.warnings == ()
        assert replayed.plan == deployed.result.plan
        np.testing.assert_array_equal(
            np.asarray(replayed(deployed.images)), np.asarray(deployed.result(deployed.images))
        )
