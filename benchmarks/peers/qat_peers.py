"""Quantization-aware training by torchao and NNCF, in a Python that has them.

    PEER -m benchmarks.peers.qat_peers torchao|nncf NUMBER_OF_CASE EPOCHS SAMPLES

torchao trains INT8 by its PT2E flow for x86, and 4-bit weights by `QATConfig`; NNCF trains INT8 by
`quantize`, and 4-bit weights by adapters of low rank, its only form with groups. Both calibrate on
the images that neural_mp calibrates on. The last line is a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measurement.qat_training import BATCH, Outcome, Tool, outcome, runs_of
from benchmarks.measurement.search_data import Digits
from benchmarks.nets.qat_nets import CASES, accuracy

GROUP, RANK = 64, 8


def torchao_int8(net: nn.Module, images: torch.Tensor, _: int) -> nn.Module:
    from torchao.quantization.pt2e import allow_exported_model_train_eval as switchable
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    batch = {0: torch.export.Dim("batch", min=2)}
    exported = torch.export.export(net, (images[:BATCH],), dynamic_shapes=(batch,)).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(exported, quantizer)
    switchable(prepared)
    prepared.eval()
    with torch.no_grad():
        for batch in images.split(BATCH):
            prepared(batch)
    return prepared


def torchao_int8_converted(prepared: Any) -> Callable[[np.ndarray], object]:
    from torchao.quantization.pt2e import move_exported_model_to_eval as to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    converted = convert_pt2e(prepared)
    to_eval(converted)
    return runs_of(converted)


def _int4_config(step: str) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    base = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))
    return QATConfig(base, step=step)


def torchao_int4(net: nn.Module, _: torch.Tensor, __: int) -> nn.Module:
    from torchao.quantization import quantize_

    quantize_(net, _int4_config("prepare"))
    return net


def torchao_int4_converted(net: Any) -> Callable[[np.ndarray], object]:
    from torchao.quantization import quantize_

    quantize_(net, _int4_config("convert"))
    return runs_of(net)


def nncf_int8(net: nn.Module, images: torch.Tensor, _: int) -> nn.Module:
    import nncf

    batches = list(images.split(BATCH))
    return nncf.quantize(net, nncf.Dataset(batches), subset_size=len(batches))


def nncf_int4(net: nn.Module, images: torch.Tensor, _: int) -> nn.Module:
    import nncf

    return nncf.compress_weights(
        net,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=GROUP,
        all_layers=True,
        dataset=nncf.Dataset(list(images.split(BATCH))),
        compression_format=nncf.CompressionFormat.FQ_LORA,
        advanced_parameters=nncf.AdvancedCompressionParameters(lora_adapter_rank=RANK),
    )


def nncf_converted(net: Any) -> Callable[[np.ndarray], object]:
    """Return the runs in OpenVINO."""
    import nncf
    import openvino

    example = torch.from_numpy(Digits("test").images[:BATCH])
    # A net with 4-bit weights has another form in OpenVINO.
    has_adapters = any("lora" in name for name, _ in net.named_parameters())
    form = nncf.StripFormat.DQ if has_adapters else nncf.StripFormat.NATIVE
    stripped = nncf.strip(net, strip_format=form, example_input=example)
    converted = openvino.convert_model(stripped, example_input=example)
    model = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: model(images)[0]


TOOLS = {
    ("torchao", 8): Tool(torchao_int8, torchao_int8_converted),
    ("torchao", 4): Tool(torchao_int4, torchao_int4_converted),
    ("nncf", 8): Tool(nncf_int8, nncf_converted),
    ("nncf", 4): Tool(nncf_int4, nncf_converted),
}


def main() -> None:
    """Print the figures of a tool on a net, and its accuracy before the training."""
    name, number, epochs, samples = sys.argv[1], *map(int, sys.argv[2:])
    warnings.filterwarnings("ignore")
    case, tool = CASES[number], TOOLS[name, CASES[number].bits]
    images = torch.from_numpy(Digits("train").images[:samples])
    untrained = tool.simulate(case.net(), images, 1)
    untrained.eval()  # returns nothing in an exported module
    baseline = accuracy(runs_of(untrained))
    trained: Outcome = outcome(tool, case, images, epochs)
    print(json.dumps({"before": baseline, **dataclasses.asdict(trained)}))


if __name__ == "__main__":
    main()
