"""Results of runs with another runtime: against FP32 everywhere, constraints, hints, resuming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import Branch
from onnx_nets import convolutions
from rich.console import Console

from neural_mp import MixedPrecision, load
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel, TransferredModel
from neural_mp.adaptors.pytorch.files import onnx_export, transfer
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.adaptors.transfer import TransferFile, transfer_file
from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.api import runtime_comparison, runtimes
from neural_mp.core.trial import Outcome
from neural_mp.errors import ConfigurationError, UnknownOperatorError
from neural_mp.io.measurement_cache import NO_CACHE
from neural_mp.reporting.tables import result_tables, verdict_line
from neural_mp.runs.report import Report, RuntimeHint
from neural_mp.tuning import unchecked
from neural_mp.tuning.listener import Listener, RunLog
from neural_mp.tuning.measurement import objectives
from neural_mp.tuning.measurement.objectives import Measurement

pytestmark = pytest.mark.usefixtures("quick_runs")

DECIDES = unchecked.decides_by_time
FP32 = {"pytorch": 10.0, "onnxrt": 4.0, "openvino": 8.0}
_files: dict[AnyModel, TransferFile] = {}
QUICK = {"exit_policy": {"max_trials": 2}, "precisions": "int8", "strategy": "basic"}


@pytest.fixture(scope="module")
def batches(digits):
    images, labels = digits[1].images, digits[1].labels
    return [(torch.from_numpy(images[i : i + 50]), labels[i : i + 50]) for i in (0, 50, 100)]


@pytest.fixture(autouse=True)
def _written_once(monkeypatch):
    """The file for other runtimes is written once per model."""
    write = runtimes.transfer_file

    def written(source: AnyModel) -> TransferFile:
        if source not in _files:
            _files[source] = write(source)
        return _files[source]

    monkeypatch.setattr(runtimes, "transfer_file", written)


@pytest.fixture
def times(monkeypatch) -> dict[str, float]:
    """Milliseconds of each runtime, and of its INT8 models (`openvino int8`): no run is timed."""
    milliseconds = {**FP32, "pytorch int8": 6.0, "onnxrt int8": 3.0, "openvino int8": 2.0}

    def rounds(runs: Sequence[partial[Any]], **_: object) -> list[list[float]]:
        return [[_seconds(run.func)] * 20 for run in runs]

    def _seconds(model: AnyModel) -> float:
        low = model.conversions.quantize > 0
        name = model.adaptor.framework
        return milliseconds[f"{name} int8" if low else name] / 1000

    monkeypatch.setattr(objectives, "time_interleaved_rounds", rounds)
    return milliseconds


def tuned(
    net, batches, accuracy: Callable[[Any], float] | None = lambda model: 1.0, **options: Any
):
    settings: dict[str, Any] = {"model": net, "runtime": "auto", **QUICK, **options}
    return MixedPrecision(eval_func=accuracy, calib_dataloader=batches, **settings)()


def chosen(report: Report) -> str:
    (name,) = (figures.framework for figures in report.runtimes if figures.chosen)
    return name


def framework(model: Any) -> str:
    return model.loaded.adaptor.framework if isinstance(model, TransferredModel) else "pytorch"


def is_low(model: Any) -> bool:
    return isinstance(model, TransferredModel) and model.loaded.conversions.quantize > 0


@pytest.mark.slow
def test_the_target_is_judged_in_the_chosen_runtime(net, batches, times):
    evaluated = []

    def accuracy(model) -> float:
        evaluated.append((framework(model), is_low(model)))
        return 0.9 if is_low(model) else 0.905

    result = tuned(net, batches, accuracy)
    assert result.framework == chosen(result.report) == "openvino"
    assert result.met is True
    assert evaluated == [("openvino", False), ("openvino", True)]
    assert (result.report.baseline_accuracy, result.report.accuracy) == (0.905, 0.9)
    speeds = {figures.framework: figures.result_speedup for figures in result.report.runtimes}
    assert speeds["pytorch"] == pytest.approx(10 / 2)
    assert speeds["onnxrt"] == pytest.approx(4 / 2)
    assert speeds["openvino"] == pytest.approx(8 / 2)


@pytest.mark.slow
def test_fp32_elsewhere_is_the_result_if_the_plan_is_slower(net, batches, times, tmp_path):
    evaluated = []

    def accuracy(model) -> float:
        evaluated.append(framework(model))
        times["openvino int8"] = 5.0  # slower than it seemed when the runtime was chosen
        return 1.0

    result = tuned(net, batches, accuracy)
    assert result.framework == chosen(result.report) == "onnxrt"
    assert evaluated == ["openvino", "openvino", "onnxrt"]
    assert result.met is False
    assert result.report.accuracy == 1.0
    assert result.report.latency == result.report.baseline_latency == 0.004
    assert result.report.best_rejected is not None
    assert result.report.best_rejected.outcome is Outcome.SLOW
    assert [trial.outcome for trial in result.trials] == [Outcome.SLOW]
    speeds = {figures.framework: figures.result_speedup for figures in result.report.runtimes}
    assert (speeds["pytorch"], speeds["onnxrt"]) == (pytest.approx(10 / 4), None)
    assert any("the FP32 model in onnxrt" in warning for warning in result.report.warnings)
    assert "FP32 model" in verdict_line(result.report, result.met)
    assert set(result.plan.counts()) == {"fp32"}
    assert {op.precision for op in result.planned.values()} == {"fp32"}
    images = batches[0][0]
    torch.testing.assert_close(result(images), net(images).detach(), rtol=1e-4, atol=1e-4)
    assert result.audit().holds
    result.report.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert all(name in page for name in ("Runtimes", "onnxrt", "openvino"))
    result.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.framework == "onnxrt"
    torch.testing.assert_close(again(images), result(images))


@pytest.mark.slow
def test_a_plan_that_is_faster_by_the_required_gain_stays(net, batches, times):
    def accuracy(model) -> float:
        times["openvino int8"] = 3.85  # 1.039 times as fast as FP32 in ONNX Runtime
        return 1.0

    result = tuned(net, batches, accuracy)
    assert result.framework == "openvino"
    assert result.met is True


@pytest.mark.slow
def test_the_fastest_fp32_is_the_result_if_no_plan_meets_the_target(net, batches, times):
    result = tuned(net, batches, lambda model: 0.1 if is_low(model) else 1.0)
    assert result.framework == chosen(result.report) == "onnxrt"
    assert result.met is False
    assert result.report.accuracy == 1.0
    assert result.report.best_rejected is not None
    assert result.report.best_rejected.accuracy == 0.1


@pytest.mark.slow
def test_rounds_of_fp32_after_the_search_are_added_until_the_choice_is_certain(
    net, batches, times, monkeypatch
):
    decisions: list[tuple[bool, bool]] = []
    time_runs = objectives.time_interleaved_rounds

    def rounds(runs, decides=None, **options):
        seconds = time_runs(runs, **options)
        if decides is not None and not any(run.func.conversions.quantize for run in runs):
            names = [run.func.adaptor.framework for run in runs]
            unsteady = dict(zip(names, seconds, strict=True))
            unsteady["onnxrt"] = [0.001] * 4 + [0.02] * 16
            decisions.append((decides(seconds), decides(list(unsteady.values()))))
        return seconds

    monkeypatch.setattr(objectives, "time_interleaved_rounds", rounds)
    result = tuned(net, batches, lambda model: 0.1 if is_low(model) else 1.0)
    assert result.framework == "onnxrt"
    assert decisions == [(True, False)]


@pytest.mark.slow
def test_fp32_elsewhere_must_meet_the_target(net, batches, times):
    result = tuned(
        net, batches, lambda model: 0.1 if is_low(model) or framework(model) == "onnxrt" else 1.0
    )
    assert result.framework == chosen(result.report) == "openvino"
    assert any("onnxrt" in warning and "0.1" in warning for warning in result.report.warnings)


@pytest.mark.slow
def test_the_source_is_the_result_if_no_runtime_gains_enough(net, batches, times):
    times |= {"openvino": 9.9, "onnxrt": 9.8, "openvino int8": 3.0, "onnxrt int8": 3.5}
    result = tuned(net, batches, lambda model: 0.1 if is_low(model) else 1.0)
    assert result.framework == chosen(result.report) == "pytorch"
    assert result.loaded.boundary is None


@pytest.mark.slow
def test_a_slower_result_without_accuracy_check_is_a_warning(net, batches, times):
    class Slower(Listener):
        def phase(self, name: str, total: int | None = None) -> None:
            if name == "Converting":
                times["openvino int8"] = 5.0

    result = tuned(net, batches, None, exit_policy={"performance_only": True}, listener=Slower())
    assert result.framework == "openvino"
    assert result.met is None
    assert any("the speed of FP32 in onnxrt" in warning for warning in result.report.warnings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "constraint"),
    [
        ("onnxrt", {"exclude": "head"}),
        ("openvino", {"op_wise": {"he.d": "fp32"}}),
        ("auto", {"optype_wise": {"Linear": "fp32"}}),
    ],
)
def test_constraints_name_ops_of_the_source(runtime, constraint, net, batches, times):
    result = tuned(net, batches, runtime=runtime, **constraint)
    assert result.framework == ("openvino" if runtime == "auto" else runtime)
    excluded = {op: effective.precision for op, effective in result.planned.items() if "head" in op}
    assert excluded
    assert set(excluded.values()) == {"fp32"}
    assert any(effective.precision == "int8" for effective in result.planned.values())


@pytest.mark.slow
def test_constraints_without_a_counterpart_keep_the_source(net, batches, times, monkeypatch):
    monkeypatch.setattr(onnx_export, "name_nodes", lambda *_: None)
    monkeypatch.setattr(runtimes, "transfer_file", transfer_file)
    result = tuned(net, batches, exclude="head")
    assert result.framework == "pytorch"
    rejected = [figures for figures in result.report.runtimes if not figures.chosen]
    reasons = [figures.reason for figures in rejected if figures.framework != "torch.compile"]
    assert all("'head'" in reason and "no counterpart" in reason for reason in reasons)
    with pytest.raises(ConfigurationError, match="no counterpart"):
        tuned(net, batches, exclude="head", runtime="onnxrt")
    with pytest.raises(UnknownOperatorError, match="nothing_like_it"):
        tuned(net, batches, exclude="nothing_like_it")


@pytest.mark.slow
def test_a_named_runtime_accepts_names_of_its_own_ops(net, batches, times):
    result = tuned(net, batches, runtime="openvino", exclude="head/WithoutBiases")
    assert result.planned["head/WithoutBiases"].precision == "fp32"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "hawq_v2"}, "gradients"),
        (
            {
                "amp": AutoMixedPrecisionOptions(allowlist_remove="conv2d"),
                "precisions": "int8,bf16",
            },
            "four lists",
        ),
    ],
)
def test_what_names_the_framework_keeps_the_source(options, reason, net, batches, times):
    result = tuned(net, batches, **options)
    assert result.framework == "pytorch"
    rejected = [figures for figures in result.report.runtimes if not figures.chosen]
    rejected = [figures for figures in rejected if figures.framework in FP32]
    assert rejected
    assert all(reason in figures.reason for figures in rejected)


def test_a_strategy_that_needs_gradients_is_an_error_in_a_named_runtime(net, batches):
    with pytest.raises(ConfigurationError, match="gradients"):
        tuned(net, batches, runtime="onnxrt", strategy="hawq_v2")


@pytest.mark.slow
def test_resume_repeats_the_choice(net, batches, times):
    first = tuned(net, batches)
    times["onnxrt int8"] = 0.1  # a new choice would take ONNX Runtime
    again = tuned(net, batches, resume=True)
    assert again.framework == first.framework == "openvino"
    assert again.report.evaluations == 0
    assert [trial.plan for trial in again.trials] == [trial.plan for trial in first.trials]
    latencies = {f.framework: f.latency for f in again.report.runtimes}
    assert latencies == {
        **{name: milliseconds / 1000 for name, milliseconds in FP32.items()},
        "torch.compile": None,
    }
    assert tuned(net, batches).framework == "onnxrt"


@pytest.fixture
def with_hints(monkeypatch) -> None:
    monkeypatch.setattr(Listener, "wants_hints", True)


@pytest.mark.slow
@pytest.mark.usefixtures("with_hints")
def test_a_run_in_the_source_ends_with_a_hint(net, batches, times, monkeypatch, caplog):
    with caplog.at_level("INFO", "neural_mp"):
        result = tuned(net, batches, runtime="source")
    assert result.framework == "pytorch"
    hint = result.report.hint
    assert hint == RuntimeHint("onnxrt", 2.5, 2.5, 2.5)
    text = "onnxrt runs this model 2.5 times as fast in FP32 (2.5 to 2.5): set runtime='auto'"
    assert str(hint) == text
    assert text in caplog.text
    with (console := Console(width=200)).capture() as shown:
        console.print(result_tables(result.report, result.met))
    assert text in shown.get()
    result.report.save_html("page.html")
    assert f"{hint.framework} runs this model 2.5 times" in Path("page.html").read_text("utf-8")
    values = {k: v for k, v in result.report.to_dict().items() if k != "speedup"}
    assert values["hint"]["framework"] == "onnxrt"
    assert Report.from_dict(values).hint == hint

    def measured_again(_: object) -> None:
        pytest.fail("the hint of an earlier run is reused")

    monkeypatch.setattr(runtime_comparison, "transfer_file", measured_again)
    assert tuned(net, batches, runtime="source").report.hint == hint


@pytest.mark.usefixtures("with_hints")
@pytest.mark.parametrize("options", [{"workers": 2}, {"runtime": "openvino"}])
def test_no_hint_where_it_has_no_place(options, net, batches, times, monkeypatch):
    monkeypatch.setattr(
        runtime_comparison, "list_reading_runtimes", lambda _: pytest.fail("no hint is wanted")
    )
    job, _ = (
        MixedPrecision(
            model=net,
            eval_func=lambda model: 1.0,
            calib_dataloader=batches,
            **{"runtime": "source", **options},
        )
        ._job_builder(RunLog())
        .build_job()
    )
    assert job.hint is None


@pytest.mark.slow
@pytest.mark.usefixtures("with_hints")
def test_a_small_gain_or_a_failing_runtime_is_no_hint(net, batches, times, monkeypatch):
    times |= {"onnxrt": 9.0, "openvino": 9.5}
    assert tuned(net, batches, runtime="source", cache=False).report.hint is None
    times |= FP32

    def broken(*_: object, **__: object) -> None:
        raise SystemError("a runtime fails in any way")

    monkeypatch.setattr(transfer, "export_onnx", broken)
    assert tuned(net, batches, runtime="source", cache=False).report.hint is None


@pytest.mark.slow
@pytest.mark.usefixtures("with_hints")
def test_no_hint_if_its_cost_is_out_of_proportion(net, batches, times):
    adaptor = get_adaptor_named("pytorch")
    source = LoadedModel(adaptor, adaptor.load(net, example=batches[0][0]))
    search = runtime_comparison.HintSearch(source, Measurement(batches[0][0]), NO_CACHE)
    assert search({"load": 20.0, "search": 100.0}, 0.01) is None
    assert search({"load": 20.0, "search": 1000.0}, 0.01) is not None
    assert search({"load": 2.0}, 0.01) is not None
    assert search({"load": 2.0}, 1.0) is None


@pytest.mark.slow
@pytest.mark.usefixtures("with_hints")
def test_no_hint_for_a_model_that_cannot_be_transferred(net, batches, times):
    result = tuned(Branch(net).eval(), batches, runtime="source", capture="modules")
    assert result.report.hint is None


@pytest.mark.slow
def test_workers_load_the_model_in_its_runtime(deep, digits):
    images, labels = digits[1].images, digits[1].labels
    data = [(images[i : i + 50], labels[i : i + 50]) for i in (0, 50, 100)]
    result = MixedPrecision(
        model=convolutions(deep),  # workers would import PyTorch for seconds, and export anew
        runtime="openvino",
        metric="accuracy",
        eval_dataloader=data,
        workers=2,
        **{**QUICK, "strategy": "random", "exit_policy": {"max_trials": 4}},
    )()
    assert result.framework == "openvino"
    assert not [trial for trial in result.trials if trial.error]
    assert result.trials
    assert type(result(images[:2])) is np.ndarray


@pytest.mark.slow
def test_without_a_metric_fp32_elsewhere_is_the_result_if_a_plan_is_no_faster(
    net, batches, times, monkeypatch
):
    class Slower(Listener):
        def phase(self, name: str, total: int | None = None) -> None:
            if name == "Converting":
                times["openvino int8"] = 5.0

    monkeypatch.setattr(unchecked, "decides_by_time", DECIDES)
    result = tuned(net, batches, None, listener=Slower())
    assert result.framework == chosen(result.report) == "onnxrt"
    assert result.met is None
    assert set(result.plan.counts()) == {"fp32"}
