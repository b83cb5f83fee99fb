"""Store the weights of a decoder in 4 bits where its perplexity allows, and generate text."""

from __future__ import annotations

import sys
from pathlib import Path

from decoder import CONTEXT, OUT, TRAINING_TEXT, UNSEEN_TEXT, train
from rich.console import Console
from transformers import AutoTokenizer

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.data import build_dataloader
from neural_mp.reporting import LiveListener, result_tables


def windows(text: Path, model: Path, count: int):
    """Batches of windows of a text, with the tokens as labels."""
    dataset = {
        "path": str(text), "tokenizer": str(model), "length": CONTEXT, "max_windows": count
    }  # fmt: skip
    return build_dataloader({"batch_size": 8, "dataset": {"text": dataset}})


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else train()
    converter = MixedPrecision()
    converter.model = str(model)
    converter.capture = "layers"  # the class stays: generate, the cache of keys and values, config
    converter.precisions = "int4,int8"
    converter.objective = "footprint"
    converter.metric = "perplexity"
    converter.accuracy_criterion = 0.01  # at most 1 % more perplexity
    converter.eval_dataloader = windows(UNSEEN_TEXT, model, 128)
    converter.calib_dataloader = windows(TRAINING_TEXT, model, 64)
    converter.workspace = OUT / "workspace"
    converter.listener = LiveListener(summary=False)
    optimized = converter()

    optimized.save(OUT / "tuned")
    Console().print(result_tables(optimized.report, optimized.met))
    tokenizer = AutoTokenizer.from_pretrained(OUT / "tuned")
    decoder = neural_mp.load(OUT / "tuned").model
    prompt = tokenizer("def main():\n", return_tensors="pt")
    written = decoder.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
