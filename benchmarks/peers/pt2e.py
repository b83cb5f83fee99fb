"""The same model by torchao's PT2E quantization for x86, to be compiled by torch's inductor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def converted(net: nn.Module, calibration: Iterable[tuple[Any, ...]]) -> nn.Module:
    """A module of quantize/dequantize pairs; as its authors' tutorial does it, batch size fixed."""
    batches = list(calibration)
    with torch.no_grad():
        graph = torch.export.export(net, batches[0], strict=True).module(check_guards=False)
    return quantized(graph, batches)


def quantized(graph: nn.Module, batches: Iterable[tuple[Any, ...]]) -> nn.Module:
    """The same of an exported graph."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        prepared = prepare_pt2e(graph, quantizer)
        for batch in batches:
            prepared(*batch)
        return convert_pt2e(prepared)
