"""Hooks that `transformers` installs at the first call do not keep a model in PyTorch."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.pytorch.files import loading, transfer
from neural_mp.core.enums import Capture
from neural_mp.errors import ConversionError

SMALL = {
    "num_encoder_blocks": 1,
    "depths": [1],
    "sr_ratios": [1],
    "hidden_sizes": [8],
    "patch_sizes": [3],
    "strides": [2],
    "num_attention_heads": [1],
    "mlp_ratios": [2],
    "decoder_hidden_size": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize("is_called", [False, True], ids=["fresh", "called"])
def test_hooks_of_transformers_do_not_keep_a_model_in_torch(is_called):
    net = SegformerForSemanticSegmentation(SegformerConfig(**SMALL)).eval()
    batch = torch.randn(2, 3, 16, 16)
    if is_called:
        with torch.no_grad():
            net(batch)
    # The first call installs the hooks.
    assert any(part._forward_hooks for part in net.modules()) == is_called
    model = loading.load_model(net, InputSpec.from_arguments(None, None, batch), Capture.WHOLE)
    assert [port.name for port in transfer.model_boundary(model).signature.inputs] == [
        "pixel_values"
    ]


class FirstCall(nn.Linear):
    """A layer whose first call returns other outputs than all later calls."""

    def __init__(self):
        super().__init__(4, 4)
        self.is_called = False

    def forward(self, inputs):
        """Return the outputs, negated in the first call."""
        outputs = super().forward(inputs)
        was_called, self.is_called = self.is_called, True
        return outputs if was_called else -outputs


def test_a_module_with_another_first_call_stays_in_torch():
    model = loading.load_model(
        FirstCall().eval(), InputSpec.from_arguments(None, None, torch.ones(2, 4)), Capture.WHOLE
    )
    with pytest.raises(ConversionError, match="its forward changes the module's state"):
        transfer.model_boundary(model)


class SharedCache(nn.Linear):
    """A layer whose first call fills a list of its class."""

    cache: ClassVar[list[str]] = []

    def forward(self, inputs):
        """Return the outputs."""
        if not self.cache:
            self.cache.append("filled")
        return super().forward(inputs)


def test_state_that_a_copy_shares_with_the_users_module_is_as_before():
    net = SharedCache(4, 4).eval()
    model = loading.load_model(
        net, InputSpec.from_arguments(None, None, torch.ones(2, 4)), Capture.WHOLE
    )
    assert transfer.model_boundary(model).signature.inputs
    assert SharedCache.cache == []
