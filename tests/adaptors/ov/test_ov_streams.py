"""Models compiled for several calls at a time."""

from __future__ import annotations

import pytest
from nets import small_net
from ov_nets import as_openvino

from neural_mp.adaptors.openvino.runtime import Runner


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "hint"), [(None, "LATENCY"), (2, "THROUGHPUT")])
def test_the_hint_and_the_streams_are_those_of_the_objective(streams, hint, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    runner = Runner(as_openvino(small_net()), streams=streams)
    compiled = runner._compiled
    assert str(compiled.get_property("PERFORMANCE_HINT")) == hint
    assert str(compiled.get_property("NUM_STREAMS")) == str(streams or 1)
    assert len(runner._requests) == (streams or 1)
