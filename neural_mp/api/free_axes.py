"""Dynamic axes for models traced at the sizes of the first batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.errors import CaptureError, ConfigurationError, ConversionError, DataError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.util.open_axes import Shapes, differing

#: Number of batches compared for different sizes.
MAX_BATCHES_COMPARED = 16


def for_all_sizes(
    load: Callable[[], AnyModel],
    loaded: AnyModel,
    batches: Batches,
    opened: Callable[[Shapes], Callable[[], AnyModel]],
) -> tuple[Callable[[], AnyModel], AnyModel]:
    """Return a loader of the model and the model, with axes that differ between batches dynamic.

    Args:
        load: loads the model with the input shapes of the first batch.
        loaded: the model loaded by `load`.
        batches: calibration batches.
        opened: input shapes → loader of the model with these shapes.

    Raises:
        CaptureError: the model accepts only the sizes of the first batch.
    """
    if not loaded.adaptor.frees_axes:
        return load, loaded
    difference = differing(islice(batches.inputs(), MAX_BATCHES_COMPARED))
    if difference is None:
        return load, loaded
    shapes, unlike = difference
    try:
        with batches.blamed():
            loaded(unlike)
    except (ConversionError, DataError):
        again = opened(shapes)
    else:
        return load, loaded
    try:
        free = again()
        with batches.blamed():
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
