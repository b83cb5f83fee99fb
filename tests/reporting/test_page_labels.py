"""Labels of the page: short, and different for different names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.reporting.page.charts import Part, Row, draw_bars, draw_points, shorten_names
from neural_mp.util.html import render_html


def test_a_name_that_fits_is_left_alone_and_a_long_one_keeps_its_end():
    labels = shorten_names(["head", "encoder.layer.11.attention.output"], 16)
    assert labels["head"] == "head"
    assert labels["encoder.layer.11.attention.output"] == "…ttention.output"


def test_names_with_the_same_end_show_the_start_that_differs():
    names = [f"encoder.layer.{i}.attention.self.query.dense" for i in range(12)]
    labels = shorten_names(names, 20)
    assert len(set(labels.values())) == 12
    assert all(len(label) <= 20 for label in labels.values())
    for i, name in enumerate(names):
        assert str(i) in labels[name]


def test_names_that_differ_in_the_middle_show_that_part_and_their_end():
    names = [f"encoder.layer.{i}.attention.{end}" for i in (0, 7, 9) for end in ("norm", "context")]
    labels = shorten_names(names, 16)
    assert labels["encoder.layer.7.attention.context"] == "…7…ntion.context"
    assert labels["encoder.layer.7.attention.norm"] == "…7…ttention.norm"


@given(st.lists(st.text("ab./", max_size=24), max_size=60), st.integers(8, 14))
def test_labels_of_different_names_differ_and_fit(names, room):
    labels = shorten_names(names, room)
    assert set(labels) == set(names)
    assert len(set(labels.values())) == len(labels)
    assert all(len(label) <= room for label in labels.values())


@pytest.mark.parametrize("chart", [draw_bars, draw_points])
@pytest.mark.parametrize("narrow", [True, False])
def test_rows_of_a_chart_have_different_labels(chart, narrow):
    names = [f"model.encoder.layer.{i}.attention.self.query.projection.dense" for i in range(9)]
    shown = render_html(chart([Row(name, [Part(0.5, "int8", name)]) for name in names], narrow))
    written = re.findall(r">([^<>]+)<title>", shown)
    assert len(set(written)) == len(written) == 9
