"""Programs of PyTorch, folders of transformers and calls of allowed ops with things changed."""

from __future__ import annotations

import copy
import json
import math
import random
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attacks.hostile_archives import rewritten
from attacks.hostile_transformers import real_folder
from attacks.mutants import broken, mutants
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.pt2.argument_checks import find_faults
from neural_mp.adaptors.pytorch.pt2.op_allowlist import is_allowed
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.errors import ModelLoadError

Attacks = Iterator[tuple[str, Callable[[], object]]]

#: Programs of `accepted/exports.py` that are changed, as exported and in core ATen.
_PROGRAMS = (
    "resnet",
    "unet",
    "lstm",
    "bags",
    "weight_norm",
    "encoder",
    "indexed",
    "written",
    "spectra",
    "branches",
    "loops",
    "layered",
    "checked",
    "divided",
    "sampled",
    "pools",
)
#: Programs whose calls of ops are changed.
_SOURCES = (
    "resnet",
    "lstm",
    "gru",
    "weight_norm",
    "pools",
    "sizes",
    "paddings",
    "norms",
    "sampled",
    "indexed",
    "written",
    "ordered",
    "reduced",
    "shaped",
    "spectra",
    "attention",
)
#: Calls kept of one op, and elements of their tensors.
_MOST_CALLS, _MOST_ELEMENTS = 4, 40_000
#: Ops whose arguments are checked where nodes are known, rather than calls.
_OF_NODES = frozenset({"embedding_bag", "_embedding_bag"})
#: Bytes that a process of attacks on ops may allocate: few enough that no op computes for minutes.
_MEMORY = 4 * 2**30
#: Part of the changes in a file that are in its program rather than in its lists of tensors.
_OF_PROGRAM = 0.85
#: Values that stand where others are expected.
ODD = (0, -1, 2**31, 2**63, -(2**64), None, True, "", "x", "s0", [], {}, 1.5, math.inf)
_INTEGERS = (0, -1, 1, 2, 3, -2, 5, 100, 10**6, -(10**6), 2**31 - 1, -(2**31), -(2**63), 2**63 - 1)
_PLAIN = (bool, int, float, str, torch.dtype)
_REALS = (0.0, -1.0, math.nan, math.inf, 1e-30, 1e30, 0.5)


def prepare_programs(folder: Path) -> None:
    """Write programs as PyTorch exports them."""
    for name, program in _programs(_PROGRAMS):
        torch.export.save(program, folder / f"{name}.pt2")


def _programs(names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    from accepted.export_flows import FLOWS
    from accepted.export_nets import NETS
    from accepted.export_ops import OPS
    from accepted.export_sequences import SEQUENCES
    from accepted.exports import UNDECOMPOSED, program_of

    for name, build in {**NETS, **SEQUENCES, **OPS, **FLOWS}.items():
        if name not in names:
            continue
        yield name, program_of(build, decomposed=False)
        if name not in UNDECOMPOSED:
            yield f"{name}_core", program_of(build, decomposed=True)


def program_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on a `.pt2` file."""
    sources = sorted(folder.glob("*.pt2"))
    target = scratch / "changed.pt2"
    for number in range(count):
        change = (altered, flipped, retyped)[number % 3]
        source = sources[number % len(sources)]

        def call(source: Path = source, change: Any = change, number: int = number) -> None:
            change(source, target, random.Random(f"programs {seed} {number}"))
            run_file(target)

        yield f"{change.__name__} {source.name} {number}", call


def run_file(path: Path) -> None:
    """Load a model and run it with its example, as every command does."""
    adaptor = adaptor_for(str(path))
    model = adaptor.load(str(path))
    try:
        adaptor.native(model)(*model.example.args, **model.example.kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError) as error:
        # Ops refuse what they check themselves.
        raise ModelLoadError(str(error)) from error


def flipped(source: Path, target: Path, chance: random.Random) -> None:
    """Write a file with bytes changed or cut short, or a sound archive with such a member."""
    if chance.random() < 0.5:
        target.write_bytes(_damaged(source.read_bytes(), chance))
        return
    with zipfile.ZipFile(source) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist() if info.file_size}
    (damaged,) = chance.choices(list(sizes), list(sizes.values()))
    rewritten(source, target, lambda n, old: _damaged(old, chance) if n == damaged else old)


def _damaged(whole: bytes, chance: random.Random) -> bytes:
    content = bytearray(whole)
    if chance.random() < 0.25:
        del content[chance.randrange(len(content)) :]
    else:
        for _ in range(chance.choice((1, 1, 2, 8))):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(content)


def altered(source: Path, target: Path, chance: random.Random) -> None:
    """Write a sound archive with values of other places, or values that make no sense."""

    def change(text: Any) -> None:
        for _ in range(chance.choice((1, 2, 3))):
            locations = list(_places(text))
            if locations:
                (within, key), (donor, its) = chance.choices(locations, k=2)
                within[key] = copy.deepcopy(chance.choice([*ODD, donor[its], donor[its]]))

    _edited(source, target, change, chance)


def retyped(source: Path, target: Path, chance: random.Random) -> None:
    """Write a sound archive with other numbers as arguments and sizes, or ops of other nodes."""

    def change(text: Any) -> None:
        graph = text.get("graph_module", {}).get("graph", text)
        numbers = [(w, k) for w, k in _places(graph) if k in ("as_int", "as_ints", "dtype")]
        targets = [(w, k) for w, k in _places(graph) if k == "target"]
        for _ in range(chance.choice((1, 1, 2))):
            if targets and chance.random() < 0.2:
                (within, key), (donor, _) = chance.choices(targets, k=2)
                within[key] = donor[key]
            elif numbers:
                within, key = chance.choice(numbers)
                number = chance.choice(_INTEGERS)
                if key == "as_ints":
                    within[key] = [*within[key][:-1], number]
                else:
                    within[key] = number if key == "as_int" else chance.randrange(14)

    _edited(source, target, change, chance)


def _edited(source: Path, target: Path, edit: Callable[[Any], None], chance: random.Random) -> None:
    # A fault in the lists of tensors would hide one in the program.
    edited = "models/model.json" if chance.random() < _OF_PROGRAM else "_config.json"

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith(edited):
            return content
        text = json.loads(content)
        edit(text)
        return json.dumps(text).encode()

    rewritten(source, target, change)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every list and dict in a value, with every index or key of it."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


class _Recorder(torch.fx.Interpreter):
    """Keeps calls of allowed ops."""

    def __init__(self, module: Any, calls: dict[str, list[Any]]) -> None:
        super().__init__(module)
        self._calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Keep the call, and make it."""
        calls = self._calls.setdefault(str(target), [])
        plain = pytree.tree_map(_copied, (tuple(args), dict(kwargs)))
        if len(calls) < _MOST_CALLS and all(map(_is_small, pytree.tree_leaves(plain))):
            calls.append(plain)
        return super().call_function(target, args, kwargs)


def _is_small(value: Any) -> bool:
    """Whether a value can be kept in a file."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() < _MOST_ELEMENTS and not vars(value)
    return value is None or isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def prepare_ops(_folder: Path) -> None:
    """Nothing: the calls are recorded where they are attacked."""


def _recorded(count: int) -> dict[str, list[Any]]:
    """Calls that exported programs make of allowed ops; of so many ops, programs permitting."""
    calls: dict[str, list[Any]] = {}
    selected: dict[str, list[Any]] = {}
    for _, program in _programs(_SOURCES):
        args, kwargs = program.example_inputs
        with torch.no_grad():
            _Recorder(program.module(check_guards=False), calls).run(
                *pytree.tree_leaves((args, kwargs))
            )
        selected = {
            name: entries for name, entries in calls.items() if entries and _is_attacked(name)
        }
        if len(selected) >= count:
            break
    return selected


def op_attacks(_folder: Path, _scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on an allowed op."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    torch.set_num_threads(1)
    calls = _recorded(count)
    names = sorted(calls)
    for number in range(count):
        name = names[number % len(names)]

        def call(name: str = name, number: int = number) -> None:
            _call(name, calls[name], random.Random(f"ops {seed} {number}"))

        yield f"{name} {number}", call


def _is_attacked(name: str) -> bool:
    return name.startswith("aten.") and _packet(name) not in _OF_NODES and _is_allowed(name)


def _packet(name: str) -> str:
    return name.split(".")[1]


def _is_allowed(name: str) -> bool:
    return is_allowed("aten", _packet(name))


def _call(name: str, calls: list[Any], chance: random.Random) -> None:
    _, packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    args, kwargs = pytree.tree_map(_copied, chance.choice(calls))
    arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        if arguments:
            key = chance.choice(list(arguments))
            arguments[key] = _changed(arguments[key], chance)
    args = tuple(arguments[index] for index in range(len(args)))
    kwargs = {key: value for key, value in arguments.items() if isinstance(key, str)}
    for fault in find_faults(op, args, kwargs):
        raise ModelLoadError(fault)
    try:
        for tensor in pytree.tree_leaves(op(*args, **kwargs)):
            if isinstance(tensor, torch.Tensor) and 0 < tensor.numel() < _MOST_ELEMENTS:
                tensor.contiguous().view(-1)[-1].item()
    except Exception as error:  # Ops refuse with errors of any type.
        raise ModelLoadError(str(error)) from error


def _changed(value: Any, chance: random.Random) -> Any:
    """Return an argument with one thing changed."""
    match value:
        case torch.Tensor():
            return _changed_tensor(value, chance)
        case bool():
            return not value
        case int():
            return chance.choice((*_INTEGERS, value + 1, value - 1, -value))
        case float():
            return chance.choice(_REALS)
        case torch.dtype():
            return chance.choice((torch.float32, torch.int64, torch.bool, torch.complex64))
        case [*items] if items:
            index = chance.randrange(len(items))
            longer, shorter = [*items, items[-1]], items[:-1]
            edited = [*items[:index], _changed(items[index], chance), *items[index + 1 :]]
            return chance.choice((longer, shorter, edited, edited, edited))
    return value


def _changed_tensor(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    if tensor.dtype in (torch.int64, torch.int32) and chance.random() < 0.5:
        clone = tensor.clone().contiguous()
        limits = torch.iinfo(tensor.dtype)
        wrong = (10**9, -(10**9), limits.max, limits.min, 100, -100, tensor.numel())
        if tensor.numel():
            clone.view(-1)[chance.randrange(tensor.numel())] = chance.choice(wrong)
        return clone
    flat = tensor.reshape(-1)
    return chance.choice(
        (
            flat,
            flat[:0],
            flat[:1],
            tensor[None],
            tensor[..., :1] if tensor.dim() else flat,
            tensor[..., :0] if tensor.dim() else flat,
            torch.cat([tensor] * 3) if tensor.dim() else flat,
            tensor.transpose(0, -1) if tensor.dim() else flat,
            tensor.to(chance.choice((torch.float64, torch.int64, torch.bfloat16, torch.bool))),
            flat[:1].expand(7, 5) if tensor.numel() else flat,
        )
    )


def prepare_folder(folder: Path) -> None:
    """Write a folder as transformers does."""
    real_folder(folder)


def folder_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on a folder of transformers."""
    real, drawn = folder / "bert", random.Random(f"folders {seed}")
    configs = mutants(json.loads((real / "config.json").read_text()), f"configs {seed}", count)
    target = scratch / "bert"
    tokens = {"input_ids": torch.ones(2, 7, dtype=torch.long)}
    for number in range(count):
        kind = ("configuration", "number", "file")[number % 3]
        case, tree = next(configs)
        chance = random.Random(drawn.random())

        def call(kind: str = kind, tree: Any = tree, chance: random.Random = chance) -> None:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(real, target)
            config = json.loads((real / "config.json").read_text())
            if kind == "configuration":
                (target / "config.json").write_text(json.dumps(tree))
            elif kind == "number":
                key = chance.choice([k for k, v in config.items() if type(v) is int])
                config[key] = chance.choice((*_INTEGERS, 10**9, 2**40))
                (target / "config.json").write_text(json.dumps(config))
            else:
                file = target / chance.choice(("config.json", "model.safetensors"))
                file.write_bytes(broken(file.read_bytes(), chance)[1])
            adaptor = adaptor_for(str(target))
            adaptor.predict(adaptor.load(str(target), example=tokens), tokens)

        yield f"{kind}: {case if kind == 'configuration' else number}", call
