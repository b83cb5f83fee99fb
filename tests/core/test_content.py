"""Digests of data."""

import numpy as np
import pytest
import torch

from neural_mp.util.fingerprint import DigestingIterator, compute_data_digest

IMAGES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "other",
    [
        IMAGES + np.eye(3, 4, dtype=np.float32) * 1e-6,
        IMAGES.astype(np.float64),
        IMAGES.reshape(4, 3),
        [IMAGES, IMAGES],
        {"images": IMAGES},
    ],
)
def test_other_data_have_another_digest(other):
    assert compute_data_digest(other) != compute_data_digest(IMAGES)


def test_a_tensor_has_the_digest_of_its_numbers():
    assert compute_data_digest(torch.from_numpy(IMAGES)) == compute_data_digest(IMAGES) is not None


def test_of_what_cannot_be_read_there_is_no_digest(tmp_path):
    with (tmp_path / "open").open("w") as file:
        assert compute_data_digest([IMAGES, file]) is None


def watched(batches, most=None):
    digesting = DigestingIterator()
    for number, _ in enumerate(digesting.wrap_batches(batches), start=1):
        if number == most:
            break
    return digesting.data_digest


def test_a_witness_tells_the_last_batch_apart():
    changed = [IMAGES, IMAGES, IMAGES + 1]
    assert watched([IMAGES] * 3) == watched(iter([IMAGES] * 3)) is not None
    assert watched([IMAGES] * 3) != watched(changed)
    assert watched([IMAGES] * 2) != watched([IMAGES] * 3)


def test_a_witness_tells_batches_of_other_sizes_apart():
    a, b, c = ([row] for row in IMAGES)
    assert watched([a + b, c]) != watched([a, b + c])


def test_a_witness_says_nothing_of_what_was_not_read_to_its_end():
    assert watched([IMAGES] * 3, most=2) is None
