"""Batches of a torch loader with a process, whole and in parts, as JSON."""

import json

import numpy as np
import torch

from neural_mp.tuning.evaluation.batches import Batches

SAMPLES = [(np.float32(index), index) for index in range(23)]
PARTS = [slice(0, 2), slice(2, 4), slice(4, None)]

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(SAMPLES, 4, num_workers=1)
    batches = Batches(loader, "eval_dataloader")
    labels = [
        [label.tolist() for _, label in batches.iterate_pairs(part)] for part in (None, *PARTS)
    ]
    print(json.dumps(labels))
