"""Samples of output in the documentation."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from cli_samples import cells, headings, lines_outside, sample_of
from examples_here import copied_to, run_command

from neural_mp.reporting import console

INSPECT = "inspect digits:trained_net --input-shape 2,1,8,8"


def test_the_sample_of_hardware_has_the_rows_of_its_output(run):
    """Support and reasons depend on the machine, rows and headings do not."""
    expected, actual = (
        [row for row in cells(text) if row[0] in ("device", "cpu")]
        for text in (sample_of("hardware"), run("hardware")[1])
    )
    assert len(expected) > 4
    assert actual == expected


@pytest.fixture(scope="module")
def digits_example(tmp_path_factory) -> Path:
    """A copy of the example of the samples; its net is not trained."""
    folder = copied_to(tmp_path_factory.mktemp("examples")) / "pytorch_digits"
    (folder / "out").mkdir()
    net = runpy.run_path(str(folder / "digits.py"))["DigitsNet"]()
    torch.save(net.state_dict(), folder / "out" / "digits_net.pt")
    return folder


@pytest.mark.slow
def test_the_sample_of_inspect_has_the_rows_and_notes_of_its_output(digits_example, monkeypatch):
    """Names and types of ops; precisions and what all ops lack depend on the machine."""
    monkeypatch.setattr(console, "_UNLIMITED", 80)  # as wide as the terminal of the sample
    expected, actual = sample_of(INSPECT), run_command(digits_example, *INSPECT.split())
    assert len(cells(expected)) == 11
    assert cells(actual) == cells(expected)
    assert headings(actual) == headings(expected)
    by_machine = ("no fp16 for any op", "no bf16 for any op")
    assert [line for line in lines_outside(actual) if not line.startswith(by_machine)] == [
        line for line in lines_outside(expected) if not line.startswith(by_machine)
    ]


@pytest.mark.slow
def test_the_sample_of_a_summary_counts_the_ops_of_its_output(digits_example):
    """Op types with their counts; reasons, of which some depend on the machine, by op types."""
    command = f"{INSPECT} --summary"
    expected, actual = sample_of(command), run_command(digits_example, *command.split())
    assert lines_outside(actual) == lines_outside(expected)
    assert headings(actual) == headings(expected)
    types = ("add", "conv2d", "linear", "mean", "relu", "all")
    counts = [row for row in cells(expected) if row[0] in types]
    assert len(counts) == len(types)
    assert [row for row in cells(actual) if row[0] in types] == counts
    low_bits = [row for row in cells(expected, 4) if row[0].startswith("int2")]
    assert len(low_bits) == 4
    assert [row for row in cells(actual, 4) if row[0].startswith("int2")] == low_bits
