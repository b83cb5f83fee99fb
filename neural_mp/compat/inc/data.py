"""`data`: datasets, transforms and loaders by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.metric import Names, translate_framework_name
from neural_mp.compat.inc.user_objects import DataLoader as CommonDataLoader
from neural_mp.compat.inc.user_objects import Postprocess
from neural_mp.data.loader import (
    Pipeline,
    TransformedDataset,
    TransformedIterable,
    build_dataloader,
)

#: INC class names → framework and name of the transform.
_TRANSFORMS: Mapping[str, tuple[str, str]] = {
    "LabelShift": ("onnxrt", "LabelShift"),
    "BilinearImagenetTransform": ("tensorflow", "BilinearImagenet"),
    "TensorflowResizeCropImagenetTransform": ("tensorflow", "ResizeCropImagenet"),
    "TensorflowResizeWithRatio": ("tensorflow", "ResizeWithRatio"),
    "ResizeTFTransform": ("tensorflow", "Resize"),
    "RescaleTFTransform": ("tensorflow", "Rescale"),
    "NormalizeTFTransform": ("tensorflow", "Normalize"),
    "ParseDecodeCocoTransform": ("tensorflow", "ParseDecodeCoco"),
    "TFSquadV1PostTransform": ("tensorflow", "SquadV1"),
    "TFSquadV1ModelZooPostTransform": ("tensorflow", "SquadV1ModelZoo"),
}
#: INC class names → framework and name of the dataset, which also accepts a transform.
_DATASETS: Mapping[str, tuple[str, str]] = {
    "TensorflowImageRecord": ("tensorflow", "ImageRecord"),
    "COCORecordDataset": ("tensorflow", "COCORecord"),
    "COCONpy": ("pytorch", "COCONpy"),
    "DummyDataset": ("onnxrt", "dummy"),
    "TensorflowModelZooBertDataset": ("tensorflow", "mzbert"),
}


class ComposeTransform(Pipeline):
    """Transforms applied in order.

    Args:
        transform_list: callables sample → sample.
    """

    def __init__(self, transform_list: Sequence[Any]) -> None:
        super().__init__(tuple(transform_list))


class _DatasetNames(Names):
    """Datasets by name; their factories also accept a transform.

    Args:
        framework: framework name of this package.
    """

    def __init__(self, framework: str | None) -> None:
        super().__init__(load_vocabulary(framework).datasets)
        self._framework = framework

    def __getitem__(self, name: str) -> Any:
        super().__getitem__(name)  # raises for unknown names
        return _make_dataset_class(self._framework, name)


def Datasets(framework: str) -> Names:  # noqa: N802  # their name
    """Return the datasets of a framework: `Datasets("tensorflow")["dummy"](shape, transform=…)`."""
    return _DatasetNames(translate_framework_name(framework))


def TRANSFORMS(framework: str, process: str = "preprocess") -> Names:  # noqa: N802  # their name
    """Return the transforms of a framework, for samples and for results."""
    return Names(load_vocabulary(translate_framework_name(framework)).transforms)


def DataLoader(framework: str, dataset: object, **options: Any) -> CommonDataLoader:  # noqa: N802
    """Return a loader of batches of a dataset.

    Args:
        framework: ignored.
        dataset: the dataset.
        **options: see `experimental.common.DataLoader`.
    """
    return CommonDataLoader(dataset, **options)


#: Loader factories: `DATALOADERS["onnxrt_qdq"](dataset, batch_size=1)`.
DATALOADERS: Mapping[str, Any] = defaultdict(lambda: CommonDataLoader)
DATASETS = Datasets
DefaultDataLoader = TensorflowDataLoader = ONNXRTDataLoader = CommonDataLoader
TensorflowModelZooBertDataLoader = CommonDataLoader


def create_dataloader(framework: str, dataloader_cfg: Mapping[str, Any]) -> Any:
    """Return the loader described by the settings, as under `dataloader` in a tuning file."""
    options = {key: value for key, value in dataloader_cfg.items() if value is not None}
    without = ("filter", "distributed", "num_workers", "pin_memory", "sampler")
    supported = {key: value for key, value in options.items() if key not in without}
    return build_dataloader(supported, load_vocabulary(translate_framework_name(framework)))


def _make_dataset_class(framework: str | None, name: str) -> Any:
    def make_dataset(
        *positional: object, transform: Any = None, filter: object = None, **options: object
    ) -> Any:
        dataset = load_vocabulary(framework).datasets.find_factory(name)(*positional, **options)
        if transform is None:
            return dataset
        indexable = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        return (TransformedDataset if indexable else TransformedIterable)(dataset, transform)

    return make_dataset


class LabelBalanceCOCORecordFilter:
    """Accepted for compatibility: all samples are used."""

    def __init__(self, size: int = 1) -> None:
        self.size = size


__all__ = [
    "DATALOADERS",
    "DATASETS",
    "TRANSFORMS",
    "ComposeTransform",
    "DataLoader",
    "Datasets",
    "DefaultDataLoader",
    "LabelBalanceCOCORecordFilter",
    "ONNXRTDataLoader",
    "Postprocess",
    "TensorflowDataLoader",
    "TensorflowModelZooBertDataLoader",
    "create_dataloader",
]


def __getattr__(name: str) -> Any:
    framework, transform = _TRANSFORMS.get(name, (None, ""))
    if transform in load_vocabulary(framework).transforms:
        return load_vocabulary(framework).transforms.find_factory(transform)
    if name in _DATASETS:
        return _make_dataset_class(*_DATASETS[name])
    return make_absent_getter(globals())(name)
