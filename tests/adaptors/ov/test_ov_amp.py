"""See `AmpContract`."""

from types import MappingProxyType

import pytest
import torch
from contract_nets import EveryKind
from ov_nets import as_openvino

from neural_mp.testing import AmpContract
from neural_mp.testing.amp_contract import COLOURS


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.slow
class TestAmp(AmpContract):
    average, softmax = "AvgPool", "Softmax"
    # OpenVINO subtracts where the net adds a negative.
    colours = MappingProxyType(
        {kind: colour for kind, colour in COLOURS.items() if kind not in ("neg", "add")}
        | {"sub": "denied"}
    )

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        torch.manual_seed(0)
        return as_openvino(EveryKind())
