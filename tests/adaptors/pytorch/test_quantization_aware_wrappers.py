"""Quantization-aware training within torch.compile, DistributedDataParallel and autocast."""

import copy

import pytest
import torch
from test_quantization_aware import IMAGES, LABELS, distance, simulation, steps
from torch import distributed
from torch.nn import functional as F

from neural_mp import training


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_simulation_trains_alike(backend):
    model = simulation()
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    assert steps(compiled, 3) == pytest.approx(steps(model, 3), rel=1e-2)
    assert distance(compiled, training.finish(compiled)) < 1e-2


def test_a_simulation_trains_in_parallel(tmp_path):
    model = simulation()
    expected = steps(copy.deepcopy(model), 3)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        assert steps(parallel, 3) == pytest.approx(expected, rel=1e-4)
        assert distance(parallel, training.finish(parallel)) < 1e-2
    finally:
        distributed.destroy_process_group()


def test_a_simulation_trains_in_autocast():
    model = simulation()
    initial = F.cross_entropy(model(IMAGES), LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        losses = steps(model, 20, 1e-2)
    assert losses[0] == pytest.approx(float(initial.detach()), rel=0.02)
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert distance(model, training.finish(model)) < 1e-2
