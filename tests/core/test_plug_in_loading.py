"""Plug-ins that cannot be imported: named where they are asked for, no obstacle elsewhere."""

from __future__ import annotations

import logging

import pytest

from neural_mp.adaptors.registry import adaptor_for, list_framework_names
from neural_mp.errors import NeuralMPError
from neural_mp.strategies import create_strategy_named
from neural_mp.tuning.executors import get_executor_named

GROUPS = ("adaptors", "strategies", "executors")
ENTRIES = "".join(
    f"[neural_mp.{group}]\n"
    f"broken = plugged_in:Broken\nwhole = plugged_in:{group}\nother = plugged_in:number\n"
    f"partial = plugged_in:partial_{group}\nexits = exiting\n"
    for group in GROUPS
)
CODE = """
from neural_mp.adaptors.contract import Adaptor
from neural_mp.strategies import Strategy
from neural_mp.tuning.executors import Executor

def whole(base):
    kind = type("Whole", (base,), {"name": "whole"})
    kind.__abstractmethods__ = frozenset()
    return kind

adaptors, strategies, executors = map(whole, (Adaptor, Strategy, Executor))
partial_adaptors, partial_strategies, partial_executors = Adaptor, Strategy, Executor
number = 1

def __getattr__(name):
    raise ImportError("libfoo.so.3 is missing")
"""


@pytest.fixture(autouse=True)
def _plugged_in(tmp_path, monkeypatch):
    (tmp_path / "plugged_in.py").write_text(CODE)
    (tmp_path / "exiting.py").write_text("import sys; sys.exit(3)")
    package = tmp_path / "plugged-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


def by_name(group: str, name: str) -> object:
    if group == "adaptors":
        return adaptor_for(object(), name)
    return create_strategy_named(name) if group == "strategies" else get_executor_named(name)


@pytest.mark.parametrize("group", GROUPS)
def test_a_plug_in_that_cannot_be_imported_is_named_with_the_reason(group):
    why = "'plugged_in:Broken'.* cannot be imported: ImportError: libfoo.so.3 is missing"
    with pytest.raises(NeuralMPError, match=why):
        by_name(group, "broken")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("other", r"'plugged_in:number'.* must be a subclass of neural_mp\..*, got an int"),
        ("partial", r"must be a subclass of neural_mp\..* that defines \w+"),
        ("exits", r"'exiting'.* cannot be imported: SystemExit: 3"),
    ],
)
def test_a_plug_in_that_is_of_no_use_is_named_with_the_reason(group, name, reason):
    """Any object was called, which ended in a traceback, and an exit ended the process."""
    with pytest.raises(NeuralMPError, match=reason):
        by_name(group, name)


def test_a_damaged_file_of_another_package_hides_no_plug_in(tmp_path, caplog):
    package = tmp_path / "damaged-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (package / "entry_points.txt").write_bytes(b"[neural_mp.strategies]\n\xff\xfe = x\n")
    assert by_name("strategies", "whole").name == "whole"
    assert "the entry points of the package 'damaged' cannot be read" in caplog.text


def test_no_plug_in_prevents_the_choice_of_an_adaptor(caplog):
    """The class `whole` cannot be created, or fails when it is asked about a model."""
    with pytest.raises(NeuralMPError, match="object is not a model of a supported framework"):
        adaptor_for(object())


@pytest.mark.parametrize("group", GROUPS)
def test_the_others_work_and_a_warning_of_one_line_is_logged(group, caplog):
    assert by_name(group, "whole") is not None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    lines = {record.getMessage() for record in warnings}
    assert len(lines) == 4
    assert any("'plugged_in:Broken' cannot be imported" in line for line in lines)
    assert not any(record.exc_info for record in warnings)  # one line each


@pytest.mark.parametrize("group", GROUPS)
def test_any_other_name_gets_the_nearest(group):
    with pytest.raises(NeuralMPError, match="did you mean 'whole'"):
        by_name(group, "whol")


def test_a_built_in_name_is_found_without_reading_plug_ins(caplog):
    assert create_strategy_named("basic").name == "basic"
    assert get_executor_named("local").name == "local"
    assert "whole" in list_framework_names()
