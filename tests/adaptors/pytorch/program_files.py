"""Files of exported programs, whose graphs tests change as an attacker would."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import export


class Net(nn.Module):
    """A layer, and a function of its output and of a buffer."""

    def __init__(self, run: Callable[..., Any], buffer: torch.Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), run
        self.register_buffer("buffer", torch.ones(4) if buffer is None else buffer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self.layer(x), self.buffer)


def saved(folder: Path, run: Callable[..., Any], buffer: torch.Tensor | None = None) -> Path:
    """Export a net for two samples into a file."""
    path = folder / "net.pt2"
    torch.export.save(export(Net(run, buffer).eval(), (torch.ones(2, 4),)), path)
    return path


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the graph of a program in its file."""
    target = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("models/model.json"):
                program = json.loads(content)
                change(program["graph_module"]["graph"])
                content = json.dumps(program).encode()
            new.writestr(name, content)
    return target


def calls_of(graph: dict[str, Any], op: str) -> Iterator[dict[str, Any]]:
    """Yield the calls of an op in a graph of a program's text and in all graphs within."""
    for node in graph["nodes"]:
        if op in node["target"]:
            yield node
        for entry in node["inputs"]:
            if "as_graph" in entry["arg"]:
                yield from calls_of(entry["arg"]["as_graph"]["graph"], op)
