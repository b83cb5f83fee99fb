"""Stages of a decoder of the zoo: converted layer by layer, and read in another process."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from typing import Any

SAVED, WRITTEN = "saved", "written.pkl"
#: Tokens that each model writes.
TOKENS = 6
_DECODER_INPUTS = ("decoder_input_ids", "decoder_attention_mask", "labels")


def names() -> list[str]:
    """Return the model types that generate text."""
    from transformers.models.auto import modeling_auto as auto

    mapped = {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    return sorted(mapped)


def convert(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Convert a tiny model to 4 bits, generate and save; return the row."""
    import torch
    from transformers.models.auto import modeling_auto as auto

    from zoo_cases import transformers_nets
    from zoo_cases.case import NotBuiltError

    case, reasons = None, []
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    ):
        try:
            case = transformers_nets.build(job["name"], job["seed"], 1, classes=mapping)
            break
        except NotBuiltError as error:
            reasons.append(str(error))
    if case is None:
        return {"not_built": " | ".join(reasons)[-600:]}
    model, (inputs,) = case.model, case.batches
    prompt = {name: value for name, value in inputs.items() if name not in _DECODER_INPUTS}
    row: dict[str, Any] = {"way": case.way, "kind": type(model).__name__}
    with torch.no_grad():
        truth = _first(model(**inputs))
    can_write = _generate(model, prompt, row, "float_error")
    try:
        result, row["int4"] = _converted(model, inputs)
        with torch.no_grad():
            output = _first(result(inputs))
        row["error"] = float((output - truth).norm() / truth.norm())
        written = None
        if can_write is not None:
            written = result.model.generate(**prompt, **_OPTIONS)
        result.save(folder / SAVED)
    except Exception:  # noqa: BLE001 - an error of any type is a finding
        return {**row, "crashed": traceback.format_exc()[-1500:]}
    files = sum(
        file.stat().st_size
        for file in (folder / SAVED).rglob("*")
        if file.suffix in (".safetensors", ".pt2")
    )
    row["reported"], row["files"] = result.report.size, files
    (folder / WRITTEN).write_bytes(pickle.dumps((inputs, prompt, output, written)))
    return {**row, "converted": True}


_OPTIONS = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}


def _generate(model: Any, prompt: Any, row: dict[str, Any], key: str) -> Any:
    """Return the tokens that the float model writes; None if the model fails."""
    try:
        return model.generate(**prompt, **_OPTIONS)
    except Exception as error:  # noqa: BLE001 - models raise any type for tiny sizes
        row[key] = f"{type(error).__name__}: {str(error)[:200]}"
        return None


def _converted(model: Any, inputs: Any) -> tuple[Any, int]:
    from torch import nn

    from neural_mp import PrecisionPlan, convert_with_plan
    from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
    from neural_mp.core.enums import Capture
    from neural_mp.core.precision import OpConfig, Precision
    from neural_mp.core.quant_spec import QuantSpec

    adaptor = PyTorchAdaptor()
    loaded = adaptor.load(model, example=inputs, capture=Capture.LAYERS)
    spec = QuantSpec.parse("uint4 asymmetric per_group 32")
    shell: Any = loaded.shell
    layers = {
        path: shell.get_submodule(path)
        for path in loaded.parts
        if type(shell.get_submodule(path)) is nn.Linear
    }
    plan = {
        path: OpConfig(Precision.INT4, spec)
        for path, layer in layers.items()
        if layer.in_features % 32 == 0 and layer.out_features % 16 == 0
    }
    return convert_with_plan(
        model, PrecisionPlan(plan), inputs=inputs, capture=Capture.LAYERS
    ), len(plan)


def _first(outputs: Any) -> Any:
    return next(
        getattr(outputs, name)
        for name in ("logits", "last_hidden_state")
        if getattr(outputs, name, None) is not None
    )


def reload(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load the saved result in this process, and compare outputs and tokens."""
    import torch

    import neural_mp

    inputs, prompt, output, written = pickle.loads((folder / WRITTEN).read_bytes())
    try:
        loaded = neural_mp.load(folder / SAVED)
        with torch.no_grad():
            # Sums of some ops depend on the alignment of memory.
            same = torch.allclose(_first(loaded(inputs)), output, atol=1e-5, equal_nan=True)
        if written is not None:
            same = same and torch.equal(loaded.model.generate(**prompt, **_OPTIONS), written)
    except Exception:  # noqa: BLE001 - an error of any type is a finding
        return {"crashed": traceback.format_exc()[-1500:]}
    return {"reload": "equal" if same else "differs"}


DECODER_STAGES = {"decoder": convert, "decoder reload": reload}
