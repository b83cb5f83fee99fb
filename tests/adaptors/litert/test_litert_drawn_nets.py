"""Drawn nets run as planned, near float, and alike in every reader."""

from __future__ import annotations

import pytest
from litert_drawn_nets import FAMILIES, draw_net
from litert_net_check import check_net

from neural_mp.testing import machine
from neural_mp.testing.graphs.graph_check import Verdict


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(FAMILIES)), ids=FAMILIES)
def test_a_drawn_net_of_a_family_is_right(seed: int) -> None:
    net = draw_net(seed, FAMILIES[seed])
    outcome = check_net(net, machine())
    assert outcome.verdict is Verdict.RIGHT, f"{outcome.details}: {net}"
