"""Memory of calibration and of folders, and calibration that is killed in the middle.

All run in child processes, on a Llama decoder with eight layers and random weights.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import neural_mp
from benchmarks.decoders.goals import Detail, Figure, Goal
from benchmarks.decoders.settings import Settings
from benchmarks.measurement.children import child_command, run_child
from neural_mp import convert_with_plan
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights, CorrectionOptions
from neural_mp.adaptors.common.weights.weight_store import WeightStore
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.enums import Capture
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.profiling import measure_memory_growth

LAYERS, HEADS, WORDS = 8, 8, 1024
_TEXTS, _LENGTH = 16, 128
_PROGRAM = "decoders.calibration"
HEADINGS = ("calibration", "model, MB", "a block, MB", "peak beside the model, MB", "in blocks")
#: What a conversion and a search with several numbers of bits make.
_CASES = {
    "gptq, 4 bits": ("uint4 asymmetric per_group 128 gptq",),
    "awq gptq, 4 bits": ("uint4 asymmetric per_group 128 awq gptq",),
    "awq gptq, 2, 3 and 4 bits": tuple(
        f"uint{bits} asymmetric per_group 128 awq gptq" for bits in (2, 3, 4)
    ),
}
#: Type of a folder's weights, and the correction of a conversion.
_FOLDERS = (("float32", ""), ("bfloat16", ""), ("float32", " hqq"), ("float32", " gptq"))
_SHARD = "90MB"
FOLDER_HEADINGS = (
    "folder",
    "its bytes, MB",
    "result, MB",
    "peak, MB",
    "without pages of files",
    "loaded, MB",
    "without pages of files, MB",
    "peak over bytes",
    "without pages, over bytes",
)


def decoder(width: int) -> nn.Module:
    """Return a decoder with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=2 * width + 2 * width // 3 // 128 * 128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=_LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def texts() -> list[dict[str, torch.Tensor]]:
    """Return random tokens."""
    draw = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(WORDS, (4, _LENGTH), generator=draw)}
        for _ in range(_TEXTS // 4)
    ]


def _dense(net: nn.Module) -> list[str]:
    return [name for name, part in net.named_modules() if isinstance(part, nn.Linear)]


def peak(width: str, case: str) -> dict[str, Any]:
    """Return the peak of memory beside the model."""
    net = decoder(int(width))
    inputs = texts()
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=inputs[0], capture=Capture.LAYERS)
    adaptor.predict(model, inputs[0])
    specs: list[QuantSpec] = [QuantSpec.parse(text) for text in _CASES[case]]
    ops = [op for op in _dense(net) if ".layers." in op]
    with tempfile.TemporaryDirectory() as folder:
        options = CorrectionOptions(folder=Path(folder))
        weights = CorrectedWeights(adaptor, model, lambda: inputs, options)
        grown = measure_memory_growth(
            lambda: weights.correct_weights({op: specs for op in ops})
        ).total
    block = sum(4 * p.numel() for p in net.model.layers[0].parameters())
    whole = sum(4 * p.numel() for p in net.parameters())
    return {"peak": grown, "block": block, "model": whole}


def folder(source: str, dtype: str, correction: str) -> dict[str, Any]:
    """Return the peaks of memory while a folder is converted and saved, and while it is loaded.

    With the pages of the folder's files, and without: the system drops these when memory is short.
    """
    spec = QuantSpec.parse(f"uint4 asymmetric per_group 128{correction}")
    net = decoder(128).to(getattr(torch, dtype))
    plan = PrecisionPlan({op: make_weight_only(spec) for op in _dense(net)})
    with tempfile.TemporaryDirectory() as root:
        small, target = Path(root) / "small", Path(root) / "saved"
        net.save_pretrained(small)
        _convert_folder(small, target, plan)  # so that imports do not count
        neural_mp.load(target)
        conversion = measure_memory_growth(lambda: _convert_folder(Path(source), target, plan))
        loading = measure_memory_growth(lambda: neural_mp.load(target))
        sizes = {"size": _bytes(Path(source)), "stored": _bytes(target)}
    grown = {"peak": conversion.total, "own": conversion.anonymous}
    return {**sizes, **grown, "load": loading.total, "loaded_own": loading.anonymous}


def _bytes(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


def convert(width: str, workspace: str) -> dict[str, Any]:
    """Return a digest of the results of a conversion, and the number of blocks it made."""
    sizes: list[int] = []
    put = WeightStore.store_weights

    def counted(self: WeightStore, weights: Mapping[str, Any], *arguments: Any) -> None:
        put(self, weights, *arguments)
        sizes.append(len(weights))

    WeightStore.store_weights = counted  # type: ignore[method-assign]
    net, inputs = decoder(int(width)), texts()
    spec = QuantSpec.parse(_CASES["gptq, 4 bits"][0])
    plan = PrecisionPlan({op: make_weight_only(spec) for op in _dense(net) if ".layers." in op})
    result = convert_with_plan(
        net,
        plan,
        inputs=inputs[0],
        capture=Capture.LAYERS,
        calibration=inputs,
        workspace=workspace,
    )
    logits = result(**inputs[0]).logits
    return {"blocks": len(sizes), "digest": hashlib.sha256(logits.numpy().tobytes()).hexdigest()}


def _convert_folder(source: Path, target: Path, plan: PrecisionPlan) -> None:
    batches = texts()
    inputs = {name: value[:, :32] for name, value in batches[0].items()}
    convert_with_plan(
        source, plan, inputs=inputs, capture=Capture.LAYERS, calibration=batches
    ).save(target)


def memory(settings: Settings) -> Iterator[Detail | Figure]:
    """Yield the peaks of the cases."""
    for case in _CASES:
        result = run_child(_PROGRAM, "peak", str(settings.wide), case)
        megabytes = [f"{result[part] / 1e6:.0f}" for part in ("model", "block", "peak")]
        blocks = f"{result['peak'] / result['block']:.1f}"
        yield Detail(HEADINGS, (case, *megabytes, blocks))
        yield Figure(Goal.MEMORY, f"{blocks} ({case})")
    for dtype, correction in _FOLDERS:
        with tempfile.TemporaryDirectory() as source:
            net = decoder(settings.wide).to(getattr(torch, dtype))
            net.save_pretrained(source, max_shard_size=_SHARD)
            result = run_child(_PROGRAM, "folder", source, dtype, correction)
        name = f"{dtype},{correction or ' rtn'}"
        parts = ("size", "stored", "peak", "own", "load", "loaded_own")
        megabytes = [f"{result[part] / 1e6:.0f}" for part in parts]
        ratios = [f"{result[part] / result['size']:.2f}" for part in ("peak", "own")]
        yield Detail(FOLDER_HEADINGS, (name, *megabytes, *ratios))
        yield Figure(Goal.FOLDER, f"{ratios[0]} ({name})")
        yield Figure(Goal.FOLDER_OWN, f"{ratios[1]} ({name})")


def killed(settings: Settings) -> Iterator[Figure]:
    """Yield the outcome of a conversion that is killed once three blocks are finished."""
    width = str(settings.wide // 2)
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as folder:
        expected = run_child(_PROGRAM, "convert", width, whole)
        child = subprocess.Popen(child_command(_PROGRAM, "convert", width, folder))
        while child.poll() is None and _files(folder) < 3:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        stored = _files(folder)
        resumed = run_child(_PROGRAM, "convert", width, folder)
    same = "the same" if resumed["digest"] == expected["digest"] else "another"
    yield Figure(
        Goal.KILLED,
        f"killed after {stored} of {expected['blocks']} blocks, then {resumed['blocks']} made, "
        f"{same} result",
    )


def _files(folder: str) -> int:
    return len(list(Path(folder).rglob("*.npz")))


COMMANDS = {"peak": peak, "folder": folder, "convert": convert}


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    print(json.dumps(COMMANDS[name](*words)))
