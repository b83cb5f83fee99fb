"""Hooks that `transformers` installs at the first call do not keep a model in PyTorch."""

import pytest
import torch
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.pytorch.files import loading, transfer
from neural_mp.core.enums import Capture

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
def test_hooks_of_transformers_do_not_keep_a_model_in_torch():
    net, batch = (
        SegformerForSemanticSegmentation(SegformerConfig(**SMALL)).eval(),
        torch.randn(2, 3, 16, 16),
    )
    with torch.no_grad():
        net(batch)
    assert any(part._forward_hooks for part in net.modules())  # else this test tests nothing
    model = loading.load(net, InputSpec.read(None, None, batch), Capture.WHOLE)
    assert [port.name for port in transfer.boundary(model).signature.inputs] == ["pixel_values"]
