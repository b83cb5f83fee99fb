"""What every decision costs and gains, against what the framework itself computes."""

import csv
import io

import numpy as np
import pytest
import torch

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.core.precision import Precision


@pytest.fixture
def converter(hostile_net, digits, tmp_path):
    return MixedPrecision(
        model=hostile_net,
        precisions="int8",
        calib_dataloader=digits[0].loader(100),
        workspace=tmp_path / "workspace",
    )


@pytest.mark.slow
def test_every_decision_has_a_row_and_the_hostile_tensor_is_seen(converter):
    report = converter.sensitivity()
    rows = {row.name: row for row in report}
    assert len(rows) == 9  # eight convolutions and a dense layer read a tensor each
    worst = max(report, key=lambda row: row.noise)
    assert worst.ops == ("4",)  # the third convolution reads the channel that is ×1024
    assert worst.noise > 0.5
    assert worst.correction is not None
    assert worst.corrected_noise < 0.5 * worst.noise
    assert worst.corrected_output_noise < worst.output_noise
    keys = [row.sort_key for row in report]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.slow
def test_noise_at_the_outputs_is_that_of_the_model_with_one_layer_in_int8(
    converter, hostile_net, digits
):
    row = next(row for row in converter.sensitivity() if row.ops == ("4",))
    converter.op_wise = {name: "fp32" for name, _ in hostile_net.named_children() if name != "4"}
    converter.exit_policy = ExitPolicy(performance_only=True)
    converted = converter()
    assert converted.plan.counts()[Precision.INT8] == 1
    inputs = digits[0].images[:100]
    expected = hostile_net(torch.from_numpy(inputs)).detach().numpy()
    error = converted(inputs) - expected
    assert row.corrected_output_noise == pytest.approx(
        np.square(error).mean() / np.square(expected).mean(), rel=0.2
    )


@pytest.mark.slow
def test_only_the_noisiest_are_measured_at_the_outputs_where_that_is_asked(converter):
    report = converter.sensitivity(most=1)
    (measured,) = (row for row in report if row.output_noise is not None)
    assert measured.noise == max(row.noise for row in report)


@pytest.mark.slow
def test_a_result_tells_what_its_run_measured_and_why_ops_run_as_they_do(
    converter, digits, accuracy
):
    converter.metric = accuracy
    converter.eval_dataloader = digits[1].loader(100)
    converter.exclude = ["6"]
    result = converter()
    rows = {row.ops[0]: row for row in result.sensitivity()}
    assert "6" not in rows  # what may not run in INT8 is no decision
    assert rows["4"].runs_in == "int8"
    assert rows["4"].reason.startswith("corrected: ")
    assert all(row.seconds_gained is not None for row in rows.values())


def test_the_csv_has_every_column(converter):
    report = converter.sensitivity(most=0)
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [row["name"] for row in rows] == [row.name for row in report]
    assert float(rows[0]["noise"]) == report.rows[0].noise
