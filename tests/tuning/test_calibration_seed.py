"""`calibration_seed` draws the calibration samples from all of the data."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from neural_mp import MixedPrecision
from neural_mp.errors import ConfigurationError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.calibration_batches import Calibration, sample_words
from neural_mp.tuning.listener import Listener, RunLog

#: Data sorted by class: batch i holds samples of class i.
SORTED = [np.full((4, 3), number, np.float32) for number in range(10)]


def classes(seed, samples=12, batches=SORTED):
    calibration = Calibration(Batches(batches, "calib_dataloader"), samples, seed)
    read = [int(inputs[0, 0]) for inputs in calibration.iterate_inputs()]
    assert calibration.batch_count == len(read)
    return read


def test_without_a_seed_the_first_samples_are_read():
    assert classes(None) == [0, 1, 2]


def test_a_seed_draws_as_many_samples_and_repeats_them():
    for seed in range(20):
        drawn = classes(seed)
        assert len(set(drawn)) == len(drawn) == 3
        assert classes(seed) == drawn
    assert len({tuple(classes(seed)) for seed in range(20)}) > 10


def test_every_part_of_the_data_is_drawn_equally_often():
    counts = Counter(number for seed in range(600) for number in classes(seed))
    # Each batch is among 3 of 10: binomial with mean 180 and deviation 11.
    assert set(counts) == set(range(10))
    assert all(abs(count - 180) < 5 * 11.2 for count in counts.values())


def test_batches_of_any_size_hold_the_samples():
    batches = [np.full((size, 3), size, np.float32) for size in (5, 1, 4, 2, 3)]
    for seed in range(30):
        calibration = Calibration(Batches(batches, "calib_dataloader"), 6, seed)
        sizes = [len(inputs) for inputs in calibration.iterate_inputs()]
        assert sum(sizes) >= 6
    assert sorted(classes(3, samples=1000)) == list(range(10))


class OneAtATime:
    """A loader whose iterators share their state."""

    def __init__(self):
        self._rest = []

    def __iter__(self):
        self._rest = list(SORTED)
        while self._rest:
            yield self._rest.pop(0)


def test_a_loader_of_one_pass_at_a_time_is_drawn_from_too():
    calibration = Calibration(Batches(OneAtATime(), "calib_dataloader"), 12, seed=1)
    read = [int(inputs[0, 0]) for inputs in calibration.iterate_inputs()]
    assert read == classes(1)


def test_the_time_limit_holds_while_batches_are_drawn():
    def raise_late() -> None:
        raise TimeoutError

    calibration = Calibration(Batches(SORTED, "calib_dataloader"), 12, seed=1)
    with pytest.raises(TimeoutError):
        next(calibration.iterate_inputs(raise_late))


def test_other_samples_are_measured_anew():
    assert len({sample_words(100, None), sample_words(100, 0), sample_words(100, 1)}) == 3


def test_python_overrides_the_file():
    content = {"quantization": {"calibration": {"seed": 4}}}
    assert MixedPrecision().calibration_seed is None
    assert MixedPrecision(content).calibration_seed == 4
    assert MixedPrecision(content, calibration_seed=5).calibration_seed == 5


@pytest.mark.parametrize("seed", [-1, "first", 1.5])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ConfigurationError, match="seed: expected a whole number from 0"):
        MixedPrecision({"quantization": {"calibration": {"seed": seed}}})


def test_a_job_calibrates_with_the_drawn_samples():
    converter = MixedPrecision(
        model=torch.nn.Linear(3, 2).eval(),
        eval_func=lambda model: 1.0,
        calib_dataloader=[torch.from_numpy(batch) for batch in SORTED],
        precisions="int8",
        sampling_size=12,
        calibration_seed=7,
    )
    job, _ = converter._job_builder(RunLog(Listener())).build_job()
    drawn = classes(7)
    assert [int(inputs[0, 0]) for inputs in job.calibration.iterate_inputs()] == drawn
    observations = job.model.with_calibration(job.calibration.iterate_inputs()).observations
    highest = {limits["minmax"][1] for limits in observations.ranges.values()}
    assert float(max(drawn)) in highest  # the range of the input
    assert max(drawn) > max(classes(None))
