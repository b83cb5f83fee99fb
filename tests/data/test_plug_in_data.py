"""Datasets and transforms that installed packages bring by entry point."""

import numpy as np
import pytest

from neural_mp.config import parse_settings
from neural_mp.data import build_dataloader
from neural_mp.errors import ConfigurationError

CODE = """
import numpy as np

class Squares:
    def __init__(self, count=3):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return np.full(2, index, np.float32), index**2

class Negated:
    def __call__(self, sample):
        inputs, label = sample
        return -inputs, label
"""
ENTRIES = """[neural_mp.datasets]
squares = plugged_data:Squares
dummy = plugged_data:Squares
[neural_mp.transforms]
negated = plugged_data:Negated
"""


@pytest.fixture
def _plugged_in(tmp_path, monkeypatch):
    (tmp_path / "plugged_data.py").write_text(CODE)
    package = tmp_path / "plugged-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


def batches(**spec):
    return list(build_dataloader({"batch_size": 2, **spec}))


@pytest.mark.usefixtures("_plugged_in")
def test_a_dataset_and_a_transform_are_found_by_their_names():
    pairs = batches(dataset={"squares": {"count": 4}}, transform={"Negated": {}})
    inputs = np.concatenate([inputs for inputs, _ in pairs])
    labels = np.concatenate([labels for _, labels in pairs])
    np.testing.assert_array_equal(inputs[:, 0], [0, -1, -2, -3])
    np.testing.assert_array_equal(labels, [0, 1, 4, 9])


@pytest.mark.usefixtures("_plugged_in")
def test_a_tuning_file_names_it_without_trust():
    loader = "dataloader: {dataset: {squares: {count: 2}}}"
    settings = parse_settings(f"evaluation: {{accuracy: {{metric: mse, {loader}}}}}")
    assert len(list(build_dataloader(settings.evaluation.dataloader))) == 2


@pytest.mark.usefixtures("_plugged_in")
def test_a_built_in_dataset_is_not_replaced():
    (inputs, _), *_ = batches(dataset={"dummy": {"shape": [5], "size": 2}})
    assert inputs.shape == (2, 5)


@pytest.mark.usefixtures("_plugged_in")
def test_its_options_are_checked_and_its_name_is_suggested():
    with pytest.raises(ConfigurationError, match="no option 'cuont'; did you mean 'count'"):
        batches(dataset={"squares": {"cuont": 4}})
    with pytest.raises(ConfigurationError, match="did you mean 'squares'"):
        batches(dataset={"sqares": {}})


def test_without_the_package_the_name_is_refused():
    with pytest.raises(ConfigurationError, match="unknown dataset 'squares'"):
        batches(dataset={"squares": {}})
