"""Noise of single tensors and weights, of which quiet neighbours are measured together."""

import numpy as np
import pytest
from test_qdq_models import Planned, batches, mixed  # noqa: F401 (a fixture)

from neural_mp.adaptors.onnxrt.targets import switch_model


def test_quiet_neighbours_share_the_noise_of_all_together(mixed, monkeypatch):  # noqa: F811
    """Loud tensors are measured alone, and the sum of all is the same within 1 dB."""
    monkeypatch.setattr(switch_model, "_MAX_SINGLES", 1)
    data = batches()
    planned = Planned(mixed, "qnn", data)

    def noises(quiet):
        monkeypatch.setattr(switch_model, "_QUIET_NSR", quiet)
        figures = planned.adaptor.width_figures(planned.held, data[0], planned.observed)
        return np.array([tensor.noise_at_bits(8) for tensor in figures.tensors])

    singles = noises(0.0)
    loud = singles > singles.max() / 2
    grouped = noises(singles.max() / 4)
    np.testing.assert_allclose(grouped[loud], singles[loud])
    assert len(set(grouped[~loud])) < len(set(singles[~loud]))
    assert 10 * np.log10(grouped.sum() / singles.sum()) == pytest.approx(0, abs=1)
