"""Run by an environment with `neural-compressor`: its INT8 of one of our nets, and what it took.

PEER -m benchmarks.peers.inc_pytorch model
"""

import json
import sys

import psutil
from torch.utils.data import DataLoader, Dataset

from benchmarks.measurement.clock import Clock
from benchmarks.measurement.peak import peak_memory
from benchmarks.nets.torch_nets import NETS


class Labelled(Dataset):
    """Samples, each with a label that nobody reads: it takes pairs."""

    def __init__(self, inputs):
        self._inputs = inputs

    def __len__(self):
        return len(self._inputs[0])

    def __getitem__(self, index):
        sample = [tensor[index] for tensor in self._inputs]
        return (sample[0] if len(sample) == 1 else sample), 0


def main() -> None:
    chosen = NETS[sys.argv[1]]
    from neural_compressor import PostTrainingQuantConfig, quantization

    net = chosen.build()
    loader = DataLoader(Labelled(chosen.inputs(chosen.samples)), batch_size=chosen.batch)
    config = PostTrainingQuantConfig(calibration_sampling_size=[chosen.samples])
    baseline, clock = psutil.Process().memory_info().rss, Clock()
    with clock.part("all"):
        quantized = quantization.fit(net, config, calib_dataloader=loader)
    names = [f"{type(m).__module__}.{type(m).__name__}" for m in quantized.model.modules()]
    layers = sum("quantized" in name and ("Conv" in name or "Linear" in name) for name in names)
    memory = (peak_memory() - baseline) / 1e6
    print(json.dumps({"parts": clock.parts, "megabytes": memory, "layers": layers}))


if __name__ == "__main__":
    main()
