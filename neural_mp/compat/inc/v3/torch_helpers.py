"""Names that scripts import from `neural_compressor.torch.utils`, `.export` and `.algorithms`."""

# What is imported and not used is for scripts.
# ruff: noqa: F401

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.utils import get_torch_version, inputs_of_pair, logger
from neural_mp.compat.inc.v3.devices import (
    CPU_Accelerator,
    CUDA_Accelerator,
    HPU_Accelerator,
    ProcessorType,
    XPU_Accelerator,
    accelerator,
    accelerator_registry,
    auto_detect_accelerator,
    cpu_info,
    detect_device,
    detect_processor_type_based_on_hw,
    get_accelerator,
    get_processor_type_from_user_config,
)
from neural_mp.compat.inc.v3.torch_configs import (
    DOUBLE_QUANT_CONFIGS,
    get_default_double_quant_config,
)
from neural_mp.errors import CaptureError
from neural_mp.util.system.memory import read_peak_bytes

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

T = TypeVar("T")
LWQ_WORKSPACE = "nc_workspace/layer_wise"


class SaveLoadFormat(Enum):
    """Formats of `save` and `load`."""

    DEFAULT = "default"
    HUGGINGFACE = "huggingface"
    VLLM = "vllm"


def is_hpex_available() -> bool:
    """Whether models run on Gaudi: never here."""
    return False


is_hpu_available = is_ipex_available = is_ipex_imported = is_habana_framework_installed = (
    is_hpex_available
)


def get_ipex_version() -> None:
    """Return None: its kernels are not used."""


def get_used_cpu_mem_MB() -> float:  # noqa: N802
    """Return the peak memory of this process in MB."""
    return read_peak_bytes() / (1 << 20)


def get_used_hpu_mem_MB() -> float:  # noqa: N802
    """Return 0: models do not run on Gaudi."""
    return 0.0


def get_model_device(model: Module) -> torch.device:
    """Return the device of the first weight of a module; that of the CPU without weights."""
    for value in model.parameters():
        return value.device
    return importlib.import_module("torch").device("cpu")


def get_double_quant_config_dict(double_quant_type: str = "BNB_NF4") -> dict[str, Any]:
    """Return the options of a configuration with quantized scales."""
    return get_default_double_quant_config(double_quant_type).to_dict()


def move_input_to_device(input: T, device: object = None) -> T:
    """Return the input: models run on the CPU, where data are."""
    return input


move_input_device = move_input_to_device


def forward_wrapper(model: Module, input: object, device: object = None) -> Any:
    """Return the outputs of a module for a batch: a dict, a list of inputs, or one input.

    A list that the parameters of the module do not match is one input.
    """
    if isinstance(input, Mapping):
        return model(**input)
    if isinstance(input, tuple | list) and _accepts_arguments(model, len(input)):
        return model(*input)
    return model(input)


def _accepts_arguments(model: Module, count: int) -> bool:
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*range(count))
    except TypeError:
        return False
    return True


def model_forward(
    model: Module, dataloader: Iterable[Any], iters: int = 100, device: object = None
) -> None:
    """Run a module on the inputs of the first batches of a loader; -1 for all."""
    for count, batch in enumerate(dataloader):
        if count == iters:
            return
        forward_wrapper(model, inputs_of_pair(batch))


def get_example_input(dataloader: Iterable[Any], i: int = 1) -> Any:
    """Return the inputs of the batch number `i`; of the last one in a shorter loader."""
    first = [*itertools.islice(dataloader, i + 1)]
    return inputs_of_pair(first[-1]) if first else None


class CapturedDataloader:
    """The recorded calls of a module, as batches.

    Args:
        args_list: positional arguments of each call.
        kwargs_list: keyword arguments of each call.
    """

    def __init__(
        self, args_list: Sequence[tuple[Any, ...]], kwargs_list: Sequence[Mapping[str, Any]]
    ) -> None:
        self.args_list, self.kwargs_list = args_list, kwargs_list

    def __iter__(self) -> Iterator[Any]:
        for args, kwargs in zip(self.args_list, self.kwargs_list, strict=True):
            if not args:
                yield kwargs
            elif kwargs:
                yield args, kwargs
            else:
                yield args[0] if len(args) == 1 else args


def export(model: Module, example_inputs: tuple[Any, ...], dynamic_shapes: object = None) -> Module:
    """Return the graph of a module, captured by `torch.export`.

    The graph can be prepared and converted like the module itself, which needs no export.

    Args:
        model: the module.
        example_inputs: inputs of one call.
        dynamic_shapes: see `torch.export.export`.

    Raises:
        CaptureError: the graph cannot be captured.
    """
    torch = importlib.import_module("torch")
    try:
        with torch.no_grad():
            program = torch.export.export(
                model.eval(), args=tuple(example_inputs), dynamic_shapes=dynamic_shapes
            )
    except Exception as error:
        # The exception type depends on the code of the module.
        raise CaptureError(
            f"the graph of {type(model).__name__} cannot be captured: {error}; prepare the module "
            f"itself, which is then converted module by module"
        ) from error
    return program.module()


def load_empty_model(
    pretrained_model_name_or_path: str | Path, cls: type[Module] | None = None, **options: object
) -> Module:
    """Return a model of transformers for conversion layer by layer: with its weights, here.

    Args:
        pretrained_model_name_or_path: folder or name of the model.
        cls: class of transformers; default: `AutoModelForCausalLM`.
        **options: passed on to `from_pretrained`.
    """
    kind = importlib.import_module("transformers").AutoModelForCausalLM if cls is None else cls
    return kind.from_pretrained(pretrained_model_name_or_path, **options).eval()


def set_module(model: Module, op_name: str, new_module: Module) -> None:
    """Replace a module by its path."""
    parent, _, name = op_name.rpartition(".")
    setattr(model.get_submodule(parent), name, new_module)


def fetch_module(model: Module, op_name: str) -> Module | None:
    """Return a module by its path; None if there is none."""
    return dict(model.named_modules()).get(op_name)


def get_model_info(model: Module, white_module_list: tuple[type, ...]) -> list[tuple[str, str]]:
    """Return name and class of the modules of some types."""
    return [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, tuple(white_module_list))
    ]


_absent = make_absent_getter(globals())


def __getattr__(name: str) -> Any:
    """Return a bound of torch's versions, such as `TORCH_VERSION_2_7_0`, or a placeholder."""
    relation, prefix, digits = name.partition("TORCH_VERSION_")
    if not prefix or relation not in ("", "GT_OR_EQUAL_"):
        return _absent(name)
    from packaging.version import Version

    version = Version(digits.replace("_", "."))
    return get_torch_version() >= version if relation else version
