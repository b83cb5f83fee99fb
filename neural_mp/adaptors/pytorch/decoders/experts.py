"""Experts of a mixture as dense layers of their own, so that each is converted for itself.

`transformers` holds the weights of all experts of a layer in two parameters with three axes. In a
private copy of a model, a module with the same function and two dense layers per expert takes their
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

_MATRICES, _GATE_UP, _DOWN = 3, "gate_up_proj", "down_proj"

#: What `transformers` says of experts that compute as `SplitExperts` does: the flags of
#: `use_experts_implementation`, and the name of its own gate.
_PROPERTIES = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
_DEFAULT_GATE = "_default_apply_gate"
#: The tokens that an expert is called with, among all of the batch; None outside of such calls.
ROUTED_TOKENS: ContextVar[torch.Tensor | None] = ContextVar("routed_tokens", default=None)


class _Expert(nn.Module):
    """The two dense layers of an expert; weights are views of those of all experts."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = _build_linear(gate_up), _build_linear(down)


class SplitExperts(nn.Module):
    """Experts [experts, 2 · hidden, inputs] and [experts, inputs, hidden] without biases.

    Attributes:
        act_fn: the activation of the gate.
        experts: the experts.
        runs_all: whether every expert runs on every token, for capture; unrouted results count
            nothing.
    """

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.act_fn = fused.act_fn
        pairs = zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True)
        self.experts = nn.ModuleList(_Expert(gate_up, down) for gate_up, down in pairs)
        self.runs_all = False

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts that each token [tokens, inputs] is routed to."""
        result = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self.experts):
            shares = (top_k_weights * (top_k_index == index)).sum(dim=-1)
            routed = (top_k_index == index).any(dim=-1)
            tokens = torch.arange(len(routed)) if self.runs_all else routed.nonzero()[:, 0]
            if not len(tokens):
                continue
            ROUTED_TOKENS.set(tokens)
            gate, up = expert.gate_up_proj(hidden_states[tokens]).chunk(2, dim=-1)
            output = expert.down_proj(self.act_fn(gate) * up) * shares[tokens, None]
            ROUTED_TOKENS.set(None)
            result.index_add_(0, tokens, output.to(result.dtype))
        return result


def split_experts(shell: nn.Module) -> None:
    """Split the experts of a private copy of a model in place, in known forms."""
    for path, module in list(shell.named_modules()):
        if _can_split_experts(module):
            parent, _, name = path.rpartition(".")
            setattr(shell.get_submodule(parent), name, SplitExperts(module).eval())


def list_whole_experts(shell: nn.Module) -> list[str]:
    """Return the names of weights of several experts that stay as they are."""
    return [
        name
        for name, value in shell.named_parameters()
        if value.ndim == _MATRICES and _is_of_experts(shell.get_submodule(name.rpartition(".")[0]))
    ]


@contextmanager
def run_all_experts(shell: nn.Module) -> Iterator[None]:
    """Run every expert on every token within this context."""
    split = [module for module in shell.modules() if isinstance(module, SplitExperts)]
    for module in split:
        module.runs_all = True
    try:
        yield
    finally:
        for module in split:
            module.runs_all = False


def _build_linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _is_of_experts(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Experts")


def _can_split_experts(module: nn.Module) -> bool:
    """Whether a module is of `transformers` and computes as `SplitExperts` does."""
    kind: Any = type(module)
    if not kind.__module__.startswith("transformers.") or not _is_of_experts(module):
        return False
    if {name for name, _ in module.named_parameters()} != {_GATE_UP, _DOWN}:
        return False
    if any(getattr(module, name, None) is not value for name, value in _PROPERTIES.items()):
        return False
    stored: Any = module
    gate_up, down = stored.gate_up_proj.shape, stored.down_proj.shape
    return bool(
        getattr(kind._apply_gate, "__name__", "") == _DEFAULT_GATE
        and hasattr(stored, "act_fn")
        and len(gate_up) == len(down) == _MATRICES
        and tuple(gate_up) == (down[0], 2 * down[2], down[1])
    )
