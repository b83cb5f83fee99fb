"""Files with one thing changed: tuning files, plans, saved models and records of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from attacks import mutated_models as models
from attacks import mutated_plans, mutated_runs, mutated_settings, mutated_tokenizers
from attacks import mutated_sources as sources
from attacks import mutated_torch as programs
from attacks.children import Attacked, judged_in_children
from attacks.verdicts import Family, Finding

Attacks = Iterator[tuple[str, Callable[[], object]]]


@dataclass(frozen=True)
class Group:
    """Files of one kind.

    Attributes:
        name: of the kind.
        share: how many attacks it makes in the long form.
        prepare: makes what is attacked in an empty folder.
        attacks: (that folder, an empty one, a seed, how many in all) → name of each, and the call.
        a_process: how many attacks a process makes.
        seconds: each must end before.
    """

    name: str
    share: int
    prepare: Callable[[Path], object]
    attacks: Callable[[Path, Path, int, int], Attacks]
    a_process: int = 500
    seconds: float = 30


_ALL = (
    Group("tuning files", 5000, mutated_settings.prepare, mutated_settings.attacks),
    Group("plans", 2500, mutated_plans.prepare, mutated_plans.attacks),
    Group("records", 1200, mutated_runs.prepare, mutated_runs.record_attacks, 200, 20),
    Group("histories", 500, mutated_runs.prepare, mutated_runs.history_attacks, 100, 20),
    Group("PyTorch models", 300, models.prepare_pytorch, models.attacks, 75, 30),
    Group("TensorFlow models", 300, models.prepare_tensorflow, models.attacks, 50, 30),
    Group("ONNX models", 300, models.prepare_onnx, models.attacks, 75, 30),
    Group("OpenVINO models", 300, models.prepare_openvino, models.attacks, 75, 30),
    Group("frozen graphs", 400, sources.prepare_frozen, sources.frozen_attacks, 100, 60),
    Group("SavedModels", 400, sources.prepare_saved_models, sources.saved_model_attacks, 100, 60),
    Group("Keras files", 400, sources.prepare_keras, sources.keras_attacks, 100, 60),
    Group("ONNX files", 400, sources.prepare_onnx_files, sources.onnx_attacks, 100, 60),
    Group("OpenVINO files", 400, sources.prepare_openvino_files, sources.openvino_attacks, 100, 60),
    Group("LiteRT files", 400, sources.prepare_litert, sources.litert_attacks, 50, 60),
    Group("tokenizers", 400, mutated_tokenizers.prepare, mutated_tokenizers.attacks, 200, 30),
    Group("PyTorch programs", 600, programs.prepare_programs, programs.program_attacks, 150, 60),
    Group("ops of programs", 8000, programs.prepare_ops, programs.op_attacks, 4000, 30),
    Group("transformers folders", 400, programs.prepare_folder, programs.folder_attacks, 200, 60),
    Group("job folders", 300, mutated_runs.prepare_job, mutated_runs.job_attacks, 300, 10),
)
GROUPS = {group.name: group for group in _ALL}


def _family(
    name: str, groups: Sequence[Group], counts: Mapping[str, int] = MappingProxyType({})
) -> Family:
    """Return attacks on files of some kinds; `counts` holds other numbers than their shares."""
    full = sum(group.share for group in groups)

    def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
        # Groups that are made alike share what is made.
        folders = {group.prepare: folder / group.name for group in groups}
        parts = {g: counts.get(g.name, round(count * g.share / full)) for g in groups}
        yield from judged_in_children(
            [Attacked(g.name, folders[g.prepare], part, g.a_process) for g, part in parts.items()],
            seed,
        )

    return Family(name, full, findings)


def mutations(counts: Mapping[str, int]) -> Family:
    """Return attacks on files of all kinds, of some of them in given numbers."""
    return _family("mutations", _ALL, counts)


MUTATIONS = mutations({})
#: One family of each kind of file, to attack it alone.
KINDS_OF_FILES = tuple(_family(group.name, [group]) for group in _ALL)
