"""`tune --data text.txt`: options of a language model are defaults that a tuning file overrides."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from neural_mp import MixedPrecision
from neural_mp.cli.options import SearchOptions
from neural_mp.core.precision import Precision

INT4, INT8, BF16 = Precision.INT4, Precision.INT8, Precision.BF16
#: Defaults: capture, precisions, objective.
DEFAULTS = ("layers", (INT4, INT8), "footprint")


@pytest.fixture
def here(tmp_path):
    """A text, and a folder with its tokenizer."""
    tokens = [f"w{number}" for number in range(600)]
    tokenizer = Tokenizer(WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(" ".join(tokens))
    return tmp_path


def _applied(folder, content: dict, **options: str) -> tuple[str, tuple[Precision, ...], str]:
    """The options after `tune conf.yaml --data a.txt`."""
    converter = MixedPrecision(content, model=str(folder / "model"))
    SearchOptions(data=folder / "a.txt", **options).apply_to(converter)
    return str(converter.capture), tuple(converter.precisions), str(converter.objective)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, DEFAULTS),
        ({"tuning": {"objective": "latency"}}, (*DEFAULTS[:2], "latency")),
        ({"tuning": {"objective": "modelsize"}}, (*DEFAULTS[:2], "modelsize")),
        ({"mixed_precision": {"precisions": "bf16"}}, (DEFAULTS[0], (BF16,), DEFAULTS[2])),
        ({"model": {"capture": "whole"}}, ("whole", *DEFAULTS[1:])),
        (
            {
                "model": {"capture": "modules"},
                "mixed_precision": {"precisions": "int8"},
                "tuning": {"objective": "latency"},
            },
            ("modules", (INT8,), "latency"),
        ),
    ],
)
def test_a_tuning_file_wins_also_where_it_names_the_usual_default(here, content, expected):
    assert _applied(here, content) == expected


@pytest.mark.parametrize("content", [{}, {"mixed_precision": {"precisions": "bf16"}}])
def test_an_option_of_the_command_wins_over_both(here, content):
    assert _applied(here, content, precisions="int8")[1] == (INT8,)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {"performance": 0.5, "footprint": 0.5}),
        ({"tuning": {"objective": "modelsize"}}, "modelsize"),
    ],
)
def test_times_count_with_a_workload_unless_the_file_names_an_objective(here, content, expected):
    converter = MixedPrecision(content, model=str(here / "model"))
    SearchOptions(data=here / "a.txt", workload="{decode: 1.0}").apply_to(converter)
    assert converter.objective == expected
    in_file = {"tuning": {"workload": {"decode": 1.0}, **content.get("tuning", {})}}
    converter = MixedPrecision(in_file, model=str(here / "model"))
    SearchOptions(data=here / "a.txt").apply_to(converter)
    assert converter.objective == expected
