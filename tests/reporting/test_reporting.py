"""Tables say what happened, in words a person reads."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.reporting import (
    LiveListener,
    build_hardware_table,
    build_trial_table,
    formatting,
    result_tables,
)
from neural_mp.runs.report import Report

PLAN = PrecisionPlan({"conv": OpConfig(Precision.BF16), "fc": FP32})


def shown(renderable) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(renderable)
    return console.file.getvalue()


REPORT = Report(
    baseline_accuracy=0.98,
    accuracy=0.975,
    target=0.97,
    baseline_latency=0.012,
    latency=0.004,
    batch_size=32,
    baseline_size=4_000_000,
    size=1_000_000,
    evaluations=2,
    seconds={"search": 1.0},
    op_counts={"conv2d": {"int8": 8, "fp32": 1}, "mean": {"fp32": 1}},
    warnings=("mind the gap",),
)


def test_the_result_shows_before_after_ops_and_warnings():
    text = shown(result_tables(REPORT, True))
    for words_ in (
        "target is met",
        "0.98",
        "0.975",
        "-0.005",
        "3.00× as fast",
        "25%",
        "batch of 32",
    ):
        assert words_ in text
    assert "conv2d" in text
    assert "warning: mind the gap" in text


@pytest.mark.parametrize(
    ("report", "row"),
    [
        (
            Report(metric="RMSE", higher_is_better=False, target=0.3987),
            "RMSE (target 0.3987, lower is better) │",
        ),
        (Report(metric="Accuracy", target=0.9701), "Accuracy (target 0.9701) │"),
        (Report(metric="RMSE", higher_is_better=False), "RMSE (lower is better) │"),
        (Report(target=0.9701), "accuracy (target 0.9701) │"),
    ],
)
def test_the_result_names_its_metric(report, row):
    assert f"│ {row}" in shown(result_tables(report, None))


def test_a_report_of_before_the_metric_was_named_reads_back():
    data = {k: v for k, v in REPORT.to_dict().items() if k not in ("metric", "higher_is_better")}
    assert Report.from_dict(data) == REPORT


@pytest.mark.parametrize(("met", "title"), [(False, "NOT met"), (None, "was not checked")])
def test_a_result_that_is_no_success_says_so(met, title):
    assert title in shown(result_tables(REPORT, met))


def test_a_printed_report_is_a_table():
    """`print(result.report)` shows the figures, not the fields of a dataclass."""
    text = str(Report(metric="topk", baseline_accuracy=0.75, accuracy=0.5, warnings=("beware",)))
    assert "FP32 and result" in text
    assert "0.75" in text
    assert "warning: beware" in text
    assert "Report(" not in text


def test_a_report_without_figures_shows_dashes():
    assert shown(result_tables(Report(), None)).count("–") >= 4


def test_a_report_reads_back_from_its_dict():
    assert Report.from_dict(REPORT.to_dict()) == REPORT
    rejected = Report(best_rejected=Trial(PLAN, Outcome.MISSED, 0.5, 0.4))
    assert Report.from_dict(rejected.to_dict()).best_rejected == rejected.best_rejected


def test_trials_are_shown_with_their_outcome_and_error():
    rows = [
        (Trial(PLAN, Outcome.MET, 0.97, 0.01), 2.5),
        (Trial(PLAN, Outcome.FAILED, error="RuntimeError: no kernel"), None),
    ]
    text = shown(build_trial_table(rows))
    for words_ in ("met", "failed", "2.50×", "1 bf16 1 fp32", "RuntimeError: no kernel"):
        assert words_ in text


def test_the_hardware_table_tells_native_from_emulated(all_machine):
    exact, saturating = Int8Accumulation.EXACT, Int8Accumulation.SATURATING
    products = {**dict.fromkeys(KernelKind, saturating), KernelKind.DEPTHWISE: exact}
    text = shown(build_hardware_table(all_machine, {"pytorch": products}))
    for words_ in ("natively", "emulated", "FORCE_BF16=1", "pytorch", "saturating", "exact"):
        assert words_ in text


def test_a_speed_is_said_with_its_spread_and_a_difference_within_it_is_none():
    faster = Report(baseline_latency=3.0, latency=1.0, speedup_low=2.9, speedup_high=3.1)
    assert formatting.format_speedup(faster) == "3.00× as fast (2.90 to 3.10)"
    alike = replace(faster, latency=2.9, speedup_low=0.98, speedup_high=1.05)
    assert formatting.format_speedup(alike) == "no difference (0.98 to 1.05)"
    emulated = replace(faster, latency=6.0, speedup_low=0.4, speedup_high=0.6, emulated=("bf16",))
    assert formatting.format_speedup(emulated) == "0.50× as fast (0.40 to 0.60), bf16 emulated"


def test_the_cpu_time_stands_beside_the_latency():
    """On a busy machine, a speed-up by the clock may be anything."""
    busy = replace(REPORT, baseline_cpu_seconds=0.009, cpu_seconds=0.003)
    row = next(line for line in shown(result_tables(busy, True)).splitlines() if "CPU time" in line)
    for words_ in ("9 ms", "3 ms", "3.00×"):
        assert words_ in row
    assert "CPU time" not in shown(result_tables(REPORT, True))


def test_where_nothing_is_faster_the_title_does_not_say_that_the_target_was_missed():
    slow = replace(REPORT, best_rejected=Trial(PLAN, Outcome.SLOW, 0.97, 0.0))
    text = shown(result_tables(slow, False))
    assert "NOT met" not in text
    assert "faster" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_is_followed_on_any_console(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    listener = LiveListener(console)
    listener.phase("Evaluating FP32", 3)
    listener.step()
    listener.baseline(0.98, 0.97)
    listener.trial(Trial(PLAN, Outcome.MISSED, 0.9, 0.08), None)
    listener.close()
    text = console.file.getvalue()
    assert "FP32 0.98, target 0.97" in text
    assert "missed" in text


@pytest.mark.parametrize(
    ("value", "read"),
    [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs"), (0, "0 s"), (None, "–")],
)
def test_durations_have_fitting_units(value, read):
    assert formatting.format_seconds(value) == read


@pytest.mark.parametrize(
    ("value", "read"), [(12, "12 B"), (1.5e3, "1.5 kB"), (2.4e6, "2.4 MB"), (3e9, "3 GB")]
)
def test_sizes_have_fitting_units(value, read):
    assert formatting.format_size(value) == read


def test_the_table_of_trials_shows_the_interval_and_the_rule():
    figures = {
        "relative_latency": 0.8, "relative_latency_low": 0.5, "relative_latency_high": 1.25
    }  # fmt: skip
    slow = Trial(PLAN, Outcome.SLOW, 0.97, 0.0, objectives=figures)
    assert slow.speedup_interval == pytest.approx((0.8, 2.0))
    text = shown(build_trial_table([(slow, slow.speedup)]))
    assert "1.25× (0.80 to 2.00)" in text
    assert "slow: within the target, but the lower bound" in " ".join(text.split())
    assert "min_speedup" not in shown(build_trial_table([(Trial(PLAN, Outcome.MISSED), None)]))


@pytest.mark.parametrize(
    ("value", "text"),
    [(-999.7e-9, "-1 µs"), (999.7e-6, "1 ms"), (0.9996, "1 s"), (1234.0, "1230 s"), (5e-9, "5 ns")],
)
def test_durations_have_no_powers_of_ten(value, text):
    assert formatting.format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (8e-6, "0.0008 %"),
        (7e-7, "0.00007 %"),
        (1e-10, "<0.000001 %"),
        (0.0000174, "0.0017 %"),
        (0.25, "25 %"),
        (1.0, "100 %"),
        (12.3, "1230 %"),
        (float("nan"), "nan %"),
    ],
)
def test_a_fraction_reads_without_an_exponent(value, read):
    assert formatting.format_fraction(value) == read
