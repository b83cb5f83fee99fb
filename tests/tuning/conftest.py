"""What a run decides is asked here, not how its net is captured."""

import pytest
from quick_runs import make_quick, measure_briefly


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    # For workers, other processes load the net for themselves.
    workers = request.module.__name__ in ("test_workers", "test_ray")
    (measure_briefly if workers else make_quick)(monkeypatch)
