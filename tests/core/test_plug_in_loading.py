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
    f"[neural_mp.{group}]\nbroken = plugged_in:Broken\nwhole = plugged_in:Whole\n"
    for group in GROUPS
)
CODE = """
class Whole:
    name = "whole"

def __getattr__(name):
    raise ImportError("libfoo.so.3 is missing")
"""


@pytest.fixture(autouse=True)
def _plugged_in(tmp_path, monkeypatch):
    (tmp_path / "plugged_in.py").write_text(CODE)
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
def test_the_others_work_and_a_warning_of_one_line_is_logged(group, caplog):
    assert by_name(group, "whole") is not None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    (line,) = {record.getMessage() for record in warnings}
    assert "'plugged_in:Broken' cannot be imported" in line
    assert not any(record.exc_info for record in warnings)  # one line each


@pytest.mark.parametrize("group", GROUPS)
def test_any_other_name_gets_the_nearest(group):
    with pytest.raises(NeuralMPError, match="did you mean 'whole'"):
        by_name(group, "whol")


def test_a_built_in_name_is_found_without_reading_plug_ins(caplog):
    assert create_strategy_named("basic").name == "basic"
    assert get_executor_named("local").name == "local"
    assert "whole" in list_framework_names()
