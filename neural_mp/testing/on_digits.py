"""Common fixtures of all contracts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from neural_mp.testing.fixtures import Split, digits


class OnDigits:
    """Tests on scikit-learn's digits; run records stay in the folder of the test."""

    @pytest.fixture(scope="session")
    @classmethod
    def digits(cls) -> tuple[Split, Split]:
        """The digits for training and calibration, and those for evaluation."""
        return digits()

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, digits: tuple[Split, Split]) -> np.ndarray:
        """Inputs of the nets."""
        return digits[1].images[:64]

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
