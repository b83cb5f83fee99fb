"""What a run decides is asked here, not how its net is captured."""

import pytest


@pytest.fixture(autouse=True)
def _quick(request):
    if request.module.__name__ != "test_workers":  # other processes load the net for themselves
        request.getfixturevalue("quick_runs")
