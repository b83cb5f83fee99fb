"""What a run decides is asked here, not how its net is captured."""

import pytest
from quick_runs import make_quick


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    # For workers, other processes load the net for themselves.
    if request.module.__name__ not in ("test_workers", "test_ray"):
        make_quick(monkeypatch)
