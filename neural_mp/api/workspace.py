"""The workspace of a run: measurements and rounded weights kept for later runs."""

from __future__ import annotations

from pathlib import Path

from neural_mp.adaptors.common.corrected_weights import CorrectionOptions
from neural_mp.adaptors.common.learned_rounding import LearnOptions
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.config import Options
from neural_mp.config.options import DEFAULT_WORKSPACE
from neural_mp.io.measurement_cache import CACHE_FOLDER, NO_CACHE, FileCache
from neural_mp.runs.fingerprint import machine_key

#: Folder of rounded weights within a cache.
WEIGHTS_FOLDER = "weights"


def cache_of(options: Options, model: AnyModel) -> FileCache:
    """Return the workspace's cache of measurements of a model on this machine."""
    folder = _cache_folder(options)
    if folder is None:
        return NO_CACHE
    return FileCache(folder, {"model": model.fingerprint, **machine_key(model.adaptor.packages)})


def correction_options(options: Options) -> CorrectionOptions:
    """Return the options of corrections of weights; finished blocks are kept in the cache."""
    folder = _cache_folder(options)
    learning = LearnOptions(options.rounding_steps, int(options.random_seed))
    weights = None if folder is None else folder / WEIGHTS_FOLDER
    return CorrectionOptions(learning, weights, bool(options.resume))


def _cache_folder(options: Options) -> Path | None:
    workspace = options.workspace
    elsewhere = options.storage is not None and workspace == DEFAULT_WORKSPACE
    if not options.cache or elsewhere or not isinstance(workspace, str | Path):
        return None  # opening the history reports an invalid workspace
    return Path(workspace) / CACHE_FOLDER
