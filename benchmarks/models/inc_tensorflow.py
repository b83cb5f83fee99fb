"""Run by an environment with `neural-compressor`: its INT8 of a frozen graph, and what it took.

python inc_tensorflow.py graph.pb input output calibration.npy result.pb
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np


def main() -> None:
    graph, given, wanted, samples, result = sys.argv[1:]
    from neural_compressor import PostTrainingQuantConfig, quantization
    from neural_compressor.data import DataLoader

    images = np.load(samples)

    class Images:
        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return images[index], 0

    config = PostTrainingQuantConfig(
        calibration_sampling_size=[len(images)], inputs=[given], outputs=[wanted]
    )
    start = time.perf_counter()
    loader = DataLoader("tensorflow", Images(), batch_size=10)
    quantized = quantization.fit(graph, config, calib_dataloader=loader)
    seconds = time.perf_counter() - start
    Path(result).write_bytes(quantized.graph_def.SerializeToString())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps({"all": seconds, "megabytes": peak}))


if __name__ == "__main__":
    main()
