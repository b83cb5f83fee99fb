"""Work of a second or two besides a search, in a process that an attack can kill.

Each makes the same of the same folder, whether begun anew or gone on with.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
from attacks.hostile import command_here
from attacks.short_runs import MARK

from neural_mp.testing import digits

_STEP_SECONDS = 0.05
#: A list of everything that was done: lines of a file in the folder.
DONE = "done.txt"


def _note(folder: Path, line: str) -> None:
    with (folder / DONE).open("a") as file:
        file.write(f"{line}\n")


def train(folder: Path) -> dict[str, Any]:
    """Train a simulation for six epochs, with checkpoints; return the progress and the weights."""
    import torch
    from attacks.users_ways import tiny_net

    from neural_mp import PrecisionPlan
    from neural_mp.training import fit, quantization_aware

    torch.set_num_threads(1)
    torch.manual_seed(0)
    plan = PrecisionPlan.from_yaml("neural_mp_plan: 2\nops: {head: int8}\n")
    images, labels = digits()[0].images[:400], digits()[0].labels[:400]
    simulation = quantization_aware(tiny_net(), plan, calibration=[images[:100]])
    batches = [
        (torch.from_numpy(images[s : s + 100]), torch.from_numpy(labels[s : s + 100]))
        for s in range(0, 400, 100)
    ]

    def loss(outputs: Any, targets: Any) -> Any:
        time.sleep(_STEP_SECONDS)
        _note(folder, "step")
        return torch.nn.functional.cross_entropy(outputs, targets)

    progress = fit(simulation, batches, loss, epochs=6, folder=folder / "training")
    values = [value.detach().numpy().tobytes() for value in simulation.state_dict().values()]
    return {
        "losses": [round(value, 5) for value in progress.losses],
        "complete": progress.complete,
        "weights": hashlib.sha256(b"".join(values)).hexdigest(),
    }


def calibrate(folder: Path) -> dict[str, Any]:
    """Learn the rounding of a decoder block by block; return a digest of what it computes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from neural_mp import PrecisionPlan, convert_with_plan
    from neural_mp.core.enums import Capture
    from neural_mp.core.precision import make_weight_only
    from neural_mp.core.quant_spec import QuantSpec

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=4, **sizes)).eval()
    samples = [{"input_ids": torch.randint(128, (4, 16))} for _ in range(4)]
    spec = make_weight_only(QuantSpec.parse("uint4 asymmetric per_group 64 autoround"))
    names = [name for name, layer in net.named_modules() if isinstance(layer, torch.nn.Linear)]
    result = convert_with_plan(
        net,
        PrecisionPlan(dict.fromkeys(names, spec)),
        calibration=samples,
        capture=Capture.LAYERS,
        workspace=folder / "workspace",
    )
    logits = result.model(**samples[0]).logits.detach().numpy()
    return {"outputs": hashlib.sha256(np.round(logits, 4).tobytes()).hexdigest()}


_JOB = """
model: {{name: {name}.onnx}}
mixed_precision: {{precisions: int8}}
evaluation:
  accuracy:
    metric: {{metrics_of_mine:Right: {{}}}}
    dataloader: {{batch_size: 100, dataset: {{numpy: {{path: test.npz}}}}}}
tuning: {{objective: modelsize, accuracy_criterion: {{relative: 0.05}}}}
"""
_METRIC = """
import time
import numpy as np
class Right:
    def __init__(self): self.reset()
    def reset(self): self.right = self.all = 0
    def update(self, preds, labels):
        if not self.all:
            time.sleep(0.1)
            with open("done.txt", "a") as file: file.write("pass\\n")
        self.right += int((np.asarray(preds).argmax(1) == np.asarray(labels)).sum())
        self.all += len(labels)
    def result(self): return self.right / self.all
"""
JOBS = ("first", "second", "third")


def write_jobs(folder: Path, net: Path) -> None:
    """Write the files of three jobs."""
    _, test = digits()
    np.savez(folder / "test.npz", inputs=test.images.reshape(-1, 64), labels=test.labels)
    (folder / "metrics_of_mine.py").write_text(_METRIC)
    (folder / "jobs").mkdir()
    for number, name in enumerate(JOBS):
        import onnx

        model = onnx.load(net)
        model.graph.name = f"net {number}"
        onnx.save(model, folder / f"{name}.onnx")
        (folder / "jobs" / f"{name}.yaml").write_text(_JOB.format(name=name))


def tune_jobs(folder: Path) -> dict[str, Any]:
    """Tune three models; return the outcomes."""
    from neural_mp.jobs.driver import tune_many

    os.chdir(folder)
    results = tune_many("jobs", output="out")
    return {
        "outcomes": {
            Path(job.file).stem: [job.status.value, job.accuracy] for job in results.outcomes
        },
        "page": results.page.exists(),
    }


def report(folder: Path) -> dict[str, Any]:
    """Write the page of a run over an earlier one; return its digest."""
    for _ in range(10):
        command_here("report", str(folder / "workspace"), "--output", str(folder / "page.html"))
        _note(folder, "page")
    return {"page": hashlib.sha256((folder / "page.html").read_bytes()).hexdigest()}


COMMANDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "quantization-aware training": train,
    "calibration of a language model": calibrate,
    "tune-many": tune_jobs,
    "report": report,
}


def run(name: str, folder: Path, mark: str) -> None:
    """Do it, in this process, and write down what came of it."""
    os.environ[MARK] = mark
    os.setsid()
    # Who cleans up behind this process must not be who cleans up behind the attacker.
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    try:
        outcome = {"end": "right", **COMMANDS[name](folder)}
    except Exception as error:  # noqa: BLE001 (of any type: it is written down)
        outcome = {"end": type(error).__name__, "words": str(error)[:1000]}
    scratch = folder / f"{mark}.scratch"
    scratch.write_text(json.dumps(outcome))
    scratch.replace(folder / f"{mark}.json")


def started(name: str, folder: Path) -> multiprocessing.Process:
    """Return a process that does it, with its mark in `process.name`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["attacks.interrupted.short_commands", "neural_mp", "torch", "attacks.users_ways"]
    )
    mark = f"{folder.name}-{time.monotonic_ns()}".replace("/", "-")
    process = context.Process(target=run, args=(name, folder, mark), name=mark)
    process.start()
    return process  # type: ignore[return-value]


def done(folder: Path) -> list[str]:
    """Return what was done so far."""
    file = folder / DONE
    return file.read_text().splitlines() if file.exists() else []
