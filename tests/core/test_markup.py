"""HTML out of elements: whatever a text holds, it stays a text."""

from __future__ import annotations

import subprocess
import sys
import traceback
from html.parser import HTMLParser

import pytest
from machine import machine

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.errors import DataError, NeuralMPError, one_line, visible
from neural_mp.runs.report import Report
from neural_mp.util.html import (
    create_element,
    create_notebook_table,
    create_raw_element,
    render_html,
)


class _Texts(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text, self.values = [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.values += [value for _, value in attributes]

    def handle_data(self, data):
        self.text += data


def test_no_error_of_this_package_carries_control_characters():
    kinds, classes = [NeuralMPError], set()
    while kinds:
        kind = kinds.pop()
        classes.add(kind)
        kinds += kind.__subclasses__()
    assert DataError in classes
    for kind in classes:
        error = kind("op '\x1b[31mred' of a\u202efile\nnext line")
        assert str(error) == "op '\\u001b[31mred' of a\\u202efile\nnext line"
        assert str(kind(str(error))) == str(error)
        assert "\x1b" not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "text", ["</p><script>alert(1)</script>", "a & b &amp; c", "\"'`", "-->", "]]>", "名前"]
)
def test_a_text_is_read_as_it_was_written(text):
    parsed = _Texts(
        render_html(create_element("p", text, create_element("b", text), text, title=text))
    )
    assert parsed.tags == ["p", "b"]
    assert parsed.text == text * 3
    assert parsed.values == [text]


def test_characters_that_hide_or_reorder_are_written_as_their_code():
    assert visible("safe\u202etxt.exe") == "safe\\u202etxt.exe"
    assert visible("a\x00b\x1b\ud800") == "a\\u0000b\\u001b\\ud800"
    assert one_line(ValueError("a\x1b[31m\nb")) == "ValueError: a\\u001b[31m"
    assert visible("tab\tand\nline, ümläut") == "tab\tand\nline, ümläut"


def test_attributes_are_named_as_in_python():
    html = render_html(
        create_element("i", class_="a", stroke_width=1.5, hidden=True, id=None, open=False)
    )
    assert html == '<i class="a" stroke-width="1.5" hidden=""></i>'


def test_a_script_cannot_end_before_its_end():
    with pytest.raises(ValueError, match="must not contain"):
        create_raw_element("script", "'</script>'")


def test_a_long_table_is_cut_and_says_so():
    html = create_notebook_table(("op",), [(f"op{i}",) for i in range(100)], "ops")
    assert html.count("<tr>") == 61
    assert "and 40 more" in html


def test_a_notebook_shows_plans_machines_and_reports_as_tables():
    assert "<td>fp32</td>" in PrecisionPlan({"a<b": FP32})._repr_html_()
    assert "a&lt;b" in PrecisionPlan({"a<b": FP32})._repr_html_()
    forced = machine(Precision.BF16)._repr_html_()
    assert "emulated" in forced
    assert "forced by FORCE_BF16=1" in forced
    assert "0.97" in Report(baseline_accuracy=0.98, accuracy=0.97)._repr_html_()


def test_a_machine_shows_itself_though_nothing_else_was_imported():
    code = "from neural_mp.core.hardware import Hardware; print(Hardware()._repr_html_())"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "unknown CPU" in shown.stdout
