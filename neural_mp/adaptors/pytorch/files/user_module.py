"""The module of a converted model that users get, with methods of `transformers` that still hold.

The methods of the class would write integers under names that nothing reads, or count the weights
that stayed as floats only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from neural_mp.adaptors.common.weights.checkpoint_formats import CheckpointFormat
from neural_mp.adaptors.pytorch.converted_module import wrap_as_module
from neural_mp.adaptors.pytorch.decoders.transformers_folder import is_known_class
from neural_mp.adaptors.pytorch.files.checkpoints import export_checkpoint
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.errors import ConversionError


def build_user_module(model: TorchModel) -> nn.Module:
    """Return the converted model as a module.

    `save_pretrained`, `num_parameters` and `resize_token_embeddings` of a model of `transformers`
    are its own; the model keeps its class.
    """
    module = wrap_as_module(model)
    if model.shell is not None and model.converted_parts and is_known_class(model.shell):
        for name, method in _make_methods(module, model).items():
            # Not by type: the class is the user's. Copies of the module share the methods.
            object.__setattr__(module, name, method)
    return module


def _make_methods(module: Any, model: TorchModel) -> dict[str, Any]:
    shell: Any = model.shell
    # Without results cached in the model, which hold the module.
    source, rows = replace(model), _count_rows(module)

    def save_pretrained(save_directory: str | Path, **options: Any) -> None:
        """Write a checkpoint in the format of compressed-tensors, which `from_pretrained` reads.

        Raises:
            ConversionError: the format cannot hold the model, or an option is not supported.
        """
        _refuse_options("save_pretrained", {"push_to_hub", "state_dict"}, options)
        try:
            form, folder = CheckpointFormat.COMPRESSED_TENSORS, Path(save_directory)
            export_checkpoint(source, folder, form, must_be_symmetric=True)
        except ConversionError as error:
            raise ConversionError(
                f"{error}; or write the result by OptimizedModel.save, and load it by "
                f"neural_mp.load"
            ) from None

    def num_parameters(**options: Any) -> int:
        """Return the number of weights of the original model."""
        return int(shell.num_parameters(**options))

    def resize_token_embeddings(new_num_tokens: int | None = None, *_: Any, **__: Any) -> None:
        """Refuse another number of tokens.

        Raises:
            ConversionError: the number differs from that of the model.
        """
        if new_num_tokens not in (None, rows):
            raise ConversionError(
                f"the embeddings of a converted model must keep their {rows} tokens, got "
                f"{new_num_tokens}; resize those of the original model and convert it once more"
            )

    return {
        "save_pretrained": save_pretrained,
        "num_parameters": num_parameters,
        "resize_token_embeddings": resize_token_embeddings,
    }


def _count_rows(module: Any) -> int | None:
    """Return the number of tokens of the embeddings; None without embeddings."""
    try:
        table = module.get_input_embeddings()
    except NotImplementedError:
        return None  # as models of images
    return getattr(table, "num_embeddings", None)


def _refuse_options(method: str, names: set[str], options: Mapping[str, Any]) -> None:
    refused = sorted(name for name in names if options.get(name))
    if refused:
        raise ConversionError(
            f"{method} of a converted model takes no {refused[0]}; leave it out, and upload the "
            f"folder with huggingface_hub"
        )
