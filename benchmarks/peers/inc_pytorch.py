"""Run by an environment with `neural-compressor`: its INT8 of one of our nets, and what it took.

PEER -m benchmarks.peers.inc_pytorch model
"""

import json
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.measurement.clock import Clock, peak_memory
from benchmarks.nets.runtime_nets import AT_ONCE, CALIBRATED, CALIBRATION, case_of


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
    case = case_of(sys.argv[1])
    from neural_compressor import PostTrainingQuantConfig, quantization

    net, samples = case.build(), case.draw(CALIBRATION, CALIBRATED)
    loader = DataLoader(Labelled([torch.from_numpy(array) for array in samples]), AT_ONCE)
    config, clock = PostTrainingQuantConfig(calibration_sampling_size=[CALIBRATION]), Clock()
    with clock.part("all"):
        quantization.fit(net, config, calib_dataloader=loader)
    print(json.dumps({"parts": clock.parts, "peak_bytes": peak_memory()}))


if __name__ == "__main__":
    main()
