"""Parts of PyTorch models beside layers: control flow, structures, dtypes, wrappers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.utils import parametrizations
from zoo.harness import Case
from zoo.torch_cases import BY_MODULES, case, floats, integers, several

_W = 8
_ROUNDED = "rounding decides between near values"


class Net(nn.Module):
    """Two dense layers, for others to derive from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_W, _W), nn.Linear(_W, _W)


class Cond(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return torch.cond(
            x.sum() > 0,
            lambda value: self.second(value).relu(),
            lambda value: self.second(value) - 1.0,
            (hidden,),
        )


class CondOnSize(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] > 3, lambda v: self.first(v), lambda v: self.second(v), (x,))


class While(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(step: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return step + 1, self.second(value).tanh()

        start = torch.zeros((), dtype=torch.int64)
        _, last = while_loop(lambda step, value: step < 3, body, (start, self.first(x)))
        return last


class Scan(Net):
    def forward(self, x: torch.Tensor) -> Any:
        def body(state: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = (self.first(step) + self.second(state)).tanh()
            return state, state.clone()

        return scan(body, x.new_zeros(x.shape[0], _W), x, dim=1)


class Branch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden) if hidden.abs().max() > 0.1 else hidden


class Asserts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.shape[1] == _W, "width")
        torch._check(x.shape[0] < 1000)
        assert x.dim() == 2
        return self.second(self.first(x))


class AssertsValues(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x.abs() < 1e6).all())
        return self.second(self.first(x))


class Outputs(Net):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return {"last": (self.second(hidden), [hidden, None]), "all": hidden.sum(1)}


class Inputs(Net):
    def forward(self, pair: Any, named: Any, scale: torch.Tensor) -> torch.Tensor:
        return self.first(pair[0]) * scale + self.second(pair[1][0]) + named["more"]


def _nested(samples: int) -> dict[str, Any]:
    rows = floats(_W)
    return {
        "pair": (rows(samples), [rows(samples)]),
        "named": {"more": rows(samples)},
        "scale": torch.tensor(2.0),
    }


class Same(Net):
    """Inputs are returned as they are, beside a result, and one result twice."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return x, hidden, hidden


class Kinds(Net):
    """Integers, booleans and floats."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return hidden.argmax(1), hidden > 0.0, hidden.to(torch.int32), hidden.topk(2)


class Complex(Net):
    def forward(self, x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(self.first(x))
        return spectrum, torch.fft.irfft(spectrum * spectrum.conj(), n=_W)


class Twice(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.first(x).relu())


class Tied(nn.Module):
    """A table of words that is the weight of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, _W), nn.Linear(_W, 20)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens))


class Listed(nn.Module):
    """Modules and parameters in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_W, _W) for _ in range(2))
        self.named = nn.ModuleDict({"act": nn.ReLU(), "dense": nn.Linear(_W, _W)})
        self.scales = nn.ParameterList([nn.Parameter(torch.full((_W,), 1.5))])
        self.shifts = nn.ParameterDict({"last": nn.Parameter(torch.ones(_W))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.named["act"](layer(x)) * self.scales[0]
        return self.named["dense"](x) + self.shifts["last"]


class Stubs(Net):
    """The stubs of torch's own eager quantization, which do nothing by themselves."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import DeQuantStub, QuantStub

        self.inward, self.outward = QuantStub(), DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(self.second(self.first(self.inward(x))))


class Counting(Net):
    """Counts its calls in a buffer, which its result does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(self.first(x))


class InPlace(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden[:, 0] += 1.0
        hidden[hidden < 0.0] *= 0.5
        hidden.mul_(2.0).clamp_(-3.0, 3.0)
        return self.second(hidden)


class WritesInput(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return self.second(self.first(x))


class Index(Net):
    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        values = hidden.gather(1, indices).index_put((torch.tensor([0]),), torch.tensor(1.0))
        return self.second(torch.zeros_like(hidden).scatter_add(1, indices, values))


class Selected(Net):
    """As many rows as values are positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[x[:, 0] > 0.0])


class Einsum(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bid,bjd->bij", self.first(x), self.second(y))
        return torch.baddbmm(scores, x, y.transpose(1, 2)).cumsum(-1)


class Autocast(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x)
        return self.second(hidden.float())


class AutocastAll(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = torch.tanh(self.first(x) * 2.0).softmax(-1)
        return self.second(hidden.float()) + hidden.float()


class HalfInside(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x).half().softmax(-1) * 3.0).float()


class Doubled(torch.autograd.Function):
    """Twice its input, with a gradient of its own."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class OwnGradient(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Doubled.apply(self.first(x)))


class Mapped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.vmap(lambda row: row.sort().values)(self.first(x)))


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda value: self.second(self.first(value)), x, use_reentrant=False
        )


class Optional(Net):
    """Arguments with defaults, of which the data give one."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, twice: bool = True) -> Any:
        hidden = self.first(x) * (2.0 if twice else 1.0)
        return self.second(hidden if mask is None else hidden * mask)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3)) + x.amax((2, 3))


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(_W, 6)))


_X = floats(_W)

CASES: tuple[Case, ...] = (
    case("cond", Cond, _X),
    case("cond on a size", CondOnSize, _X),
    case("while_loop", While, _X),
    case("scan", Scan, floats(5, _W)),
    case("if of a value", Branch, _X, **BY_MODULES),
    case("assert of sizes", Asserts, _X),
    case("assert of values", AssertsValues, _X),
    case("outputs nested, with None", Outputs, _X),
    case("outputs that are inputs", Same, _X),
    case("outputs of integers and booleans", Kinds, _X, discontinuous=_ROUNDED),
    case("outputs of complex numbers", Complex, _X),
    case("inputs nested", Inputs, _nested),
    case("arguments left out", Optional, _X),
    case("module called twice", Twice, _X),
    case("module with tied weights", Tied, integers(20, 5)),
    case("ModuleList ModuleDict, ParameterList and ParameterDict", Listed, _X),
    case("Sequential", lambda: nn.Sequential(nn.Linear(_W, _W), nn.Sequential()), _X),
    case("DataParallel", lambda: nn.DataParallel(nn.Linear(_W, 6)), _X),
    case("QuantStub and DeQuantStub", Stubs, _X),
    case("weight_norm", lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(_W, 6))), _X),
    case("weight_norm by hooks", _old_weight_norm, _X),
    case(
        "spectral_norm",
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(4, 6, 3))),
        floats(4, 6, 6),
    ),
    case("spectral_norm by hooks", lambda: nn.utils.spectral_norm(nn.Linear(_W, 6)), _X),
    case("orthogonal", lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(_W, _W))), _X),
    case("buffer counted up", Counting, _X),
    case("update in place", InPlace, _X),
    case("update of an input", WritesInput, _X),
    case("gather, scatter, index_put", Index, several(_X, integers(_W, 3))),
    case("selection by values", Selected, _X),
    case("einsum, baddbmm, cumsum", Einsum, several(floats(5, _W), floats(6, _W))),
    case("autocast within", Autocast, _X),
    case("autocast of other ops", AutocastAll, _X),
    case("float16 inside", HalfInside, _X),
    case("autograd.Function", OwnGradient, _X),
    case("vmap", Mapped, _X),
    case("checkpoint", Checkpointed, _X),
    case("channels_last", lambda: Image().to(memory_format=torch.channels_last), floats(4, 6, 6)),
    case("float64", lambda: Image().double(), floats(4, 6, 6, dtype=torch.float64)),
    case("float16", lambda: Image().half(), floats(4, 6, 6, dtype=torch.float16)),
    case("bfloat16", lambda: Image().bfloat16(), floats(4, 6, 6, dtype=torch.bfloat16)),
)
