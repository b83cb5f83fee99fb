"""Integer kernels compute what their simulation does: one random net of each family of ops."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "fuzz_torch.py"
COUNT = 15


@pytest.mark.slow
def test_no_net_raises_or_computes_what_rounding_does_not_explain(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), "--seed", "15000", "--count", str(COUNT)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARK), run_name="__main__")
    printed, complaints = capsys.readouterr()
    assert f"{COUNT} nets, 0 failures" in printed, printed + complaints
    assert ended.value.code == 0
