"""Tables as data frames of pandas, which is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neural_mp.errors import MissingFrameworkError
from neural_mp.util.installation import install_command


def data_frame(columns: Mapping[str, Sequence[object]], index: str) -> Any:
    """Return a `pandas.DataFrame` with the given columns, one of which is its index.

    Raises:
        MissingFrameworkError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingFrameworkError(
            f"a data frame requires pandas: {install_command('pandas')}"
        ) from error
    return pd.DataFrame(dict(columns)).set_index(index)
