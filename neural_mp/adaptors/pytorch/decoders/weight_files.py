"""Weights by name in `.safetensors` files, in one file or shard by shard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from neural_mp.errors import ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.util.validators import mapping_of, record, string

#: Maximum bytes of a file: old versions of safetensors copy a file's weights to write them.
MAX_SHARD_BYTES = 1 << 30
_INDEX = record({"weight_map": mapping_of(string)}, {"metadata": lambda value: value})


def write_weights(file: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write weights by name into a `.safetensors` file.

    More weights than `MAX_SHARD_BYTES` are written into shards with an index, which `transformers`
    reads in place of the file.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    pattern = f"{file.stem}{{suffix}}{file.suffix}"
    split = split_torch_state_dict_into_shards(
        dict(weights), filename_pattern=pattern, max_shard_size=MAX_SHARD_BYTES
    )
    for shard, names in (split.filename_to_tensors or {file.name: []}).items():
        tensors = {name: weights[name] for name in names}
        save_file(tensors, file.with_name(shard), metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _index_of(file).write_text(json.dumps(index, indent=2), encoding="utf-8")


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return weights written by `write_weights`, mapped from their files.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for shard in _shard_files(file):
        try:
            weights |= load_file(shard)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{str(shard)!r} cannot be read: {error}") from error
    return weights


def _shard_files(file: Path) -> list[Path]:
    index = _index_of(file)
    if file.is_file() or not index.is_file():
        return [file]
    names = set(read_json(index, _INDEX, ModelLoadError)["weight_map"].values())
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index.name} must refer to files of the folder, got {name!r}")
    return [file.with_name(name) for name in sorted(names)]


def _index_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")
