"""What all contracts start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from neural_mp.testing.data import Split, digits


class OnDigits:
    """Tests on scikit-learn's digits; the records of runs stay in the folder of the test."""

    @pytest.fixture(scope="session")
    @classmethod
    def digits(cls) -> tuple[Split, Split]:
        """The digits to train and calibrate with, and those to look at."""
        return digits()

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
