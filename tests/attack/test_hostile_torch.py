"""No code of a file of PyTorch's runs, and no such file crashes or stops the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile_torch import findings
from verdicts import harmful

pytestmark = pytest.mark.slow

#: Every case as a file, as a saved folder, and some in a process of their own; then changed bytes.
SHORT = 200


def test_hostile_files_of_pytorch_do_nothing(tmp_path: Path) -> None:
    assert not harmful(findings(SHORT, tmp_path, 0))
