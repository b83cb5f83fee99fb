"""Models for batches of several sizes, where one was traced at the sizes of the first batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.errors import CaptureError, ConfigurationError, DataError
from neural_mp.tuning.batches import Batches
from neural_mp.util.open_axes import Shapes, differing

#: Batches that are looked at for sizes that differ.
MAX_BATCHES_COMPARED = 16


def for_all_sizes(
    load: Callable[[], AnyModel],
    loaded: AnyModel,
    batches: Batches,
    opened: Callable[[Shapes], Callable[[], AnyModel]],
) -> tuple[Callable[[], AnyModel], AnyModel]:
    """Return what loads the model, and the model, with the axes free in which batches differ.

    Args:
        load: what loads the model as the first batch shows its inputs.
        loaded: model that was loaded so.
        batches: calibration batches.
        opened: gives what loads the model with inputs of some shapes.

    Raises:
        CaptureError: the model takes the sizes of the first batch only.
    """
    if not loaded.adaptor.frees_axes:
        return load, loaded
    found = differing(islice(batches.inputs(), MAX_BATCHES_COMPARED))
    if found is None:
        return load, loaded
    shapes, unlike = found
    try:
        with batches.blamed():
            loaded(unlike)
    except DataError:
        again = opened(shapes)
    else:
        return load, loaded
    try:
        free = again()
        with batches.blamed():
            free(unlike)
    except ConfigurationError:
        # Nothing frees the axes of such a model; the batch that it does not take is refused.
        return load, loaded
    except (CaptureError, DataError) as error:
        raise CaptureError(
            f"the batches of {batches.name} differ in size, and the model does not run with inputs "
            f"of the shapes {shapes}: {' '.join(str(error).split())}; give batches of one size, "
            f"such as by padding"
        ) from error
    return again, free
