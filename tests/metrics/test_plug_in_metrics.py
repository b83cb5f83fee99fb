"""Metrics that installed packages bring by entry point."""

import numpy as np
import pytest

from neural_mp.errors import ConfigurationError
from neural_mp.metrics import METRICS, build_metric, convert_to_metric

CODE = """
import numpy as np

class WorstClass:
    higher_is_better = True

    def __init__(self, classes=2):
        self.classes = classes
        self.reset()

    def reset(self):
        self.hits = []

    def update(self, preds, labels):
        self.hits.extend((int(label), bool(p.argmax() == label)) for p, label in zip(preds, labels))

    def result(self):
        of = [[hit for label, hit in self.hits if label == c] for c in range(self.classes)]
        return min(float(np.mean(hits)) for hits in of)

def hit_rate(preds, labels):
    return float((preds.argmax(1) == labels).mean())
"""
ENTRIES = """[neural_mp.metrics]
worst_class = plugged_metrics:WorstClass
hit_rate = plugged_metrics:hit_rate
topk = plugged_metrics:hit_rate
gone = plugged_metrics:Nothing
"""
PREDICTIONS = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]])
LABELS = np.array([0, 1, 1, 0])


@pytest.fixture
def _plugged_in(tmp_path, monkeypatch):
    (tmp_path / "plugged_metrics.py").write_text(CODE)
    package = tmp_path / "plugged-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


def value_of(metric):
    metric.reset()
    metric.update(PREDICTIONS, LABELS)
    return metric.result()


@pytest.mark.usefixtures("_plugged_in")
def test_a_class_and_a_function_are_found_by_the_name_of_their_entry_point():
    assert value_of(build_metric("worst_class")) == 0.5
    assert value_of(build_metric("Worst-Class", {"classes": 1})) == 1.0
    assert value_of(convert_to_metric("hit_rate")) == 0.75


@pytest.mark.usefixtures("_plugged_in")
def test_its_options_are_checked_and_its_name_is_suggested():
    with pytest.raises(ConfigurationError, match="no option 'clases'; did you mean 'classes'"):
        build_metric("worst_class", {"clases": 3})
    with pytest.raises(ConfigurationError, match="did you mean 'worst_class'"):
        build_metric("worst_clas")


@pytest.mark.usefixtures("_plugged_in")
def test_a_built_in_metric_is_not_replaced():
    assert METRICS.find_factory("topk").__module__.startswith("neural_mp.")
    assert list(METRICS).count("topk") == 1


@pytest.mark.usefixtures("_plugged_in")
def test_an_entry_point_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigurationError, match="'plugged_metrics:Nothing' cannot be imported"):
        build_metric("gone")


def test_without_the_package_the_name_is_refused():
    with pytest.raises(ConfigurationError, match="unknown metric 'worst_class'"):
        build_metric("worst_class")
