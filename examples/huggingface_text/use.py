"""Load the tuned model and run it; the package transformers is not needed for that."""

from __future__ import annotations

from pathlib import Path

import torch

import neural_mp

tuned = neural_mp.load(Path(__file__).parent / "out" / "tuned")
input_ids = torch.tensor([[7, 12, 30, 4, 9], [5, 5, 2, 0, 0]])
outputs = tuned(input_ids=input_ids, attention_mask=(input_ids != 0).long())
print("topics:", outputs.logits.argmax(-1).tolist())
