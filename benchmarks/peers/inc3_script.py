"""A script for `neural_compressor` 3.x, as its users write one: a case, played once.

    PYTHON inc3_script.py FOLDER CASE              # with Intel Neural Compressor
    python -m neural_mp.compat.inc inc3_script.py FOLDER CASE

The folder holds the trained models and the data; a line of JSON with the figures is printed last.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from neural_compressor.torch.export import export
from neural_compressor.torch.quantization import (
    AWQConfig,
    GPTQConfig,
    RTNConfig,
    StaticQuantConfig,
    TuningConfig,
    autotune,
    convert,
    prepare,
)
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.measurement.clock import peak_memory
from benchmarks.peers.inc3_networks import TOLERATED, network

ALGORITHMS = {"rtn": RTNConfig, "gptq": GPTQConfig, "awq": AWQConfig}
#: Options without which the peer reads files of a hub: an empty path is taken for a name there.
MORE = {"gptq": {"model_path": "decoder"}}


@dataclass
class Job:
    """A trained model and its data.

    Attributes:
        name: of the model.
        model: the model.
        calibration: inputs of the calls for calibration.
        inputs: inputs of the evaluation.
        labels: expected classes; for the decoder, the inputs are the labels.
        evaluations: passes over the evaluation data so far.
    """

    name: str
    model: nn.Module
    calibration: list[torch.Tensor]
    inputs: list[torch.Tensor]
    labels: list[torch.Tensor]
    evaluations: int = 0

    @classmethod
    def read(cls, folder: Path, name: str) -> Job:
        """Read what the benchmark has written."""
        content = torch.load(folder / f"{name}.pt", weights_only=True)
        if name == "decoder":
            # GPTQ of the peer reads the path of the model from the loaded object.
            model = AutoModelForCausalLM.from_pretrained(folder / name).eval()
        else:
            model = network(name).eval()
            model.load_state_dict(content["state"])
        return cls(name, model, content["calibration"], content["inputs"], content["labels"])

    def calibrate(self, model: Any) -> None:
        """Run a model on the calibration data."""
        with torch.no_grad():
            for batch in self.calibration:
                model(batch)

    def accuracy(self, model: Any) -> float:
        """Return the fraction of right classes, or of right next tokens."""
        self.evaluations += 1
        right = total = 0
        with torch.no_grad():
            for inputs, labels in zip(self.inputs, self.labels, strict=True):
                scores, expected = self._scores(model, inputs, labels)
                right += int((scores.argmax(-1) == expected).sum())
                total += expected.numel()
        return right / total

    def perplexity(self, model: Any) -> float:
        """Return the perplexity of the evaluation data."""
        losses = []
        with torch.no_grad():
            for inputs, labels in zip(self.inputs, self.labels, strict=True):
                scores, expected = self._scores(model, inputs, labels)
                losses.append(nn.functional.cross_entropy(scores.flatten(0, -2), expected.ravel()))
        return float(torch.stack(losses).mean().exp())

    def _scores(
        self, model: Any, inputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(inputs)
        if self.name != "decoder":
            return outputs, labels
        return outputs.logits[:, :-1].float(), labels[:, 1:]


def exported(job: Job) -> Any:
    """Return the exported graph of a model, which static quantization starts from."""
    example = (job.calibration[0],)
    batch = torch.export.Dim("batch", max=4096)
    return export(job.model, example_inputs=example, dynamic_shapes=({0: batch},))


def static(job: Job) -> Any:
    """Convert a model to INT8 with calibrated ranges."""
    prepared = prepare(exported(job), StaticQuantConfig())
    job.calibrate(prepared)
    return convert(prepared)


def weights(job: Job, algorithm: str) -> Any:
    """Convert the weights of a model to 4 bits in groups of 32."""
    config = ALGORITHMS[algorithm](bits=4, group_size=32, **MORE.get(algorithm, {}))
    prepared = prepare(job.model, config, example_inputs=job.calibration[0])
    job.calibrate(prepared)
    return convert(prepared)


def tuned(job: Job, sampler: str) -> Any:
    """Search the first of a set of configurations that meets a tolerated loss."""
    configs: dict[str, list[Any]] = {
        "mlp": [RTNConfig(bits=[2, 3, 4, 8], group_size=32, use_sym=False)],
        "cnn": [StaticQuantConfig(act_algo=["kl", "minmax"])],
        "decoder": [
            RTNConfig(bits=[2, 3, 4, 8], use_sym=False),
            GPTQConfig(bits=[4, 8], **MORE["gptq"]),
        ],
    }
    more = {"sampler": sampler} if sampler else {}
    return autotune(
        exported(job) if job.name == "cnn" else job.model,
        TuningConfig(configs[job.name], tolerable_loss=TOLERATED[job.name], **more),
        eval_fn=job.accuracy,
        run_fn=job.calibrate,
        example_inputs=job.calibration[0],
    )


def file_bytes(job: Job, model: Any) -> int:
    """Return the bytes of the files of a saved model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "saved"
        if hasattr(model, "dynamic_shapes"):
            model.save(example_inputs=(job.calibration[0],), output_dir=str(folder))
        elif "save" in vars(model) or hasattr(model, "save"):
            model.save(str(folder))
        else:
            folder.mkdir()
            torch.save(model.state_dict(), folder / "weights.pt")
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(folder: str, case: str) -> None:
    """Play a case: `static cnn`, `gptq decoder`, `autotune mlp`, `search mlp`."""
    kind, _, name = case.partition(" ")
    job = Job.read(Path(folder), name)
    baseline, seconds = peak_memory(), time.process_time()
    plays: dict[str, Callable[[], Any]] = {
        "static": lambda: static(job),
        "autotune": lambda: tuned(job, ""),
        "search": lambda: tuned(job, "neural_mp"),
    }
    model = plays[kind]() if kind in plays else weights(job, kind)
    figures: dict[str, Any] = {
        "seconds": time.process_time() - seconds,
        "memory": peak_memory() - baseline,
        "evaluations": job.evaluations,
        "found": model is not None,
    }
    if model is not None:
        figures["accuracy"] = job.accuracy(model)
        figures["perplexity"] = job.perplexity(model)
        figures["bytes"] = file_bytes(job, model)
    float32 = Job.read(Path(folder), name)
    figures["baseline"] = float32.accuracy(float32.model)
    print("\n" + json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
