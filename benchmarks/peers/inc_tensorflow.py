"""Run by an environment with `neural-compressor`: its INT8 of a frozen graph, and what it took.

PEER -m benchmarks.peers.inc_tensorflow graph.pb input output calibration.npy result.pb
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.measurement.peak import peak_memory


def main() -> None:
    graph, input_name, output_name, samples, result = sys.argv[1:]
    from neural_compressor import PostTrainingQuantConfig, quantization
    from neural_compressor.data import DataLoader

    images = np.load(samples)

    class Images:
        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return images[index], 0

    config = PostTrainingQuantConfig(
        calibration_sampling_size=[len(images)], inputs=[input_name], outputs=[output_name]
    )
    start = time.perf_counter()
    loader = DataLoader("tensorflow", Images(), batch_size=10)
    quantized = quantization.fit(graph, config, calib_dataloader=loader)
    seconds = time.perf_counter() - start
    Path(result).write_bytes(quantized.graph_def.SerializeToString())
    print(json.dumps({"all": seconds, "megabytes": peak_memory() / 1e6}))


if __name__ == "__main__":
    main()
