"""Data frames: their arrays are data, the frame itself is refused by one line."""

from __future__ import annotations

import numpy as np
import pytest

from neural_mp import MixedPrecision, common
from neural_mp.data import ArrayDataset
from neural_mp.errors import DataError

pd = pytest.importorskip("pandas")


@pytest.fixture
def frame():
    return pd.DataFrame({"a": [1.0, 2.0, 4.0], "b": [0.5, 0.25, 0.0], "label": [0, 1, 1]})


def test_rows_of_a_frame_are_samples(frame):
    inputs = frame[["a", "b"]].to_numpy("float32")
    loader = common.DataLoader(ArrayDataset(inputs, frame["label"].to_numpy()), batch_size=2)
    (first, labels), (second, _) = loader
    np.testing.assert_array_equal(np.concatenate([first, second]), inputs)
    assert labels.tolist() == [0, 1]


def test_a_frame_as_dataset_or_loader_is_an_error_that_shows_its_arrays(frame):
    with pytest.raises(DataError, match=r"dataset must hold samples .*got a DataFrame.*to_numpy"):
        common.DataLoader(frame, batch_size=2)
    torch = pytest.importorskip("torch")
    converter = MixedPrecision()
    converter.model = torch.nn.Linear(2, 2).eval()
    converter.precisions = "int8"
    converter.metric = "accuracy"
    converter.eval_dataloader = frame
    with pytest.raises(DataError, match=r"^eval_dataloader must hold .*got a DataFrame"):
        converter()
