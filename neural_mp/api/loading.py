"""Loading of the user's model with the adaptor of its framework, for inputs of all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.adaptors.registry import adaptor_for, is_composite
from neural_mp.api.saved_model import is_saved_model
from neural_mp.core.enums import FLOAT_CACHE, INT8_CACHE, Capture
from neural_mp.core.precision import Precision
from neural_mp.data.user_imports import load_user_object
from neural_mp.errors import (
    CaptureError,
    ConfigurationError,
    ConversionError,
    DataError,
    ModelLoadError,
)
from neural_mp.io.files import require_regular_file
from neural_mp.io.limits import trusting
from neural_mp.tuning.evaluation.batches import Batches, FirstBatch, name_loader
from neural_mp.util.open_axes import Shapes, find_differing_axes
from neural_mp.util.validators import file_path, validate_option

#: Number of batches compared for different sizes.
MAX_BATCHES_COMPARED = 16


def for_all_sizes(
    load: Callable[[], AnyModel],
    loaded: AnyModel,
    batches: Batches,
    opened: Callable[[Shapes], Callable[[], AnyModel]],
) -> tuple[Callable[[], AnyModel], AnyModel]:
    """Return a loader of the model and the model, with axes that differ between batches dynamic.

    `load` loads the model with the input shapes of the first batch; `opened` returns the loader of
    the model with other shapes.

    Raises:
        CaptureError: the model accepts only the sizes of the first batch.
    """
    if not loaded.adaptor.frees_axes:
        return load, loaded
    difference = find_differing_axes(islice(batches.iterate_inputs(), MAX_BATCHES_COMPARED))
    if difference is None:
        return load, loaded
    shapes, unlike = difference
    try:
        with batches.blame_batch():
            loaded(unlike)
    except (ConversionError, DataError):
        again = opened(shapes)
    else:
        return load, loaded
    try:
        free = again()
        with batches.blame_batch():
            free(unlike)
    except ConfigurationError:
        # The axes of such a model stay fixed; a batch of another size raises an error later.
        return load, loaded
    except (CaptureError, ConversionError, DataError) as error:
        raise CaptureError(
            f"the batches of {batches.name} differ in size, and the model does not run with inputs "
            f"of the shapes {shapes}: {' '.join(str(error).split())}; give batches of one size, "
            f"such as by padding"
        ) from error
    return again, free


def resolve_source(source: object) -> Any:
    """Return a model that an adaptor accepts: import `module:attribute`, and call functions.

    Raises:
        ConfigurationError: the name cannot be imported.
        ModelLoadError: the path is a pipe or a device.
    """
    if is_composite(source):
        return {name: resolve_source(part) for name, part in source.items()}
    if isinstance(source, str | Path):
        validate_option("model", file_path, source)
        try:
            require_regular_file(source)
        except OSError as error:
            raise ModelLoadError(f"{str(source)!r} cannot be read: {error.strerror}") from None
    if callable(getattr(source, "save_plan", None)) and hasattr(source, "loaded"):
        raise ConfigurationError(
            "the model must be one to tune, got the result of a run, which is converted already; "
            "set the model that you gave that run, or call the result itself: result(inputs)"
        )
    if is_saved_model(source):
        raise ConfigurationError(
            f"{str(source)!r} holds a model that was already converted; give the original model, "
            f"or use neural_mp.load"
        )
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        module, _, attribute = source.partition(":")
        if all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            imported = load_user_object(source)
            is_factory = isinstance(imported, type) or type(imported).__name__ == "function"
            return imported() if is_factory else imported
    return source


def load_source(
    source: object,
    framework: str | None,
    inputs: object,
    *,
    outputs: object = None,
    example: object = None,
    capture: Capture = Capture.WHOLE,
    kv_cache: str = FLOAT_CACHE,
    trust: Iterable[str] = (),
    provider: str | None = None,
) -> AnyModel:
    """Load a model (object, path or `module:attribute`) with the adaptor of its framework.

    For the options, see `Adaptor.load`. `example` are the inputs of one batch; a `FirstBatch` makes
    errors name its loader. `kv_cache` is that of converted decoders. `trust` names ops with side
    effects that the model file may contain. `provider` is an execution provider of the runtime.
    """
    resolved = resolve_source(source)
    adaptor = adaptor_for(resolved, framework)
    if provider is not None:
        adaptor = adaptor.with_provider(provider)
    data = example if isinstance(example, FirstBatch) else FirstBatch(example, "")
    try:
        with trusting(trust):
            model = adaptor.load(
                resolved, inputs=inputs, outputs=outputs, example=data.inputs, capture=capture
            )
    except DataError as error:
        name_loader(error, data.name)
        raise
    if kv_cache == INT8_CACHE:
        model = adaptor.with_int8_cache(model)
    return LoadedModel(adaptor, model)


def without_int8_if_no_data(
    precisions: tuple[Precision, ...], calibration: Batches | None
) -> tuple[tuple[Precision, ...], tuple[str, ...]]:
    """Return the precisions without INT8 if calibration data are missing, and a warning.

    Raises:
        DataError: only INT8 was requested.
    """
    if Precision.INT8 not in precisions or calibration is not None:
        return precisions, ()
    remaining = tuple(p for p in precisions if p is not Precision.INT8)
    if not [p for p in remaining if p is not Precision.FP32]:
        raise DataError(
            "int8 requires calibration data; set calib_dataloader or eval_dataloader, or "
            "approach = 'dynamic' to compute the ranges of dense layers on every run"
        )
    return remaining, ("int8 requires calibration data, got none; continuing without int8",)
