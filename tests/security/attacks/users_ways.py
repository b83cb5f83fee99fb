"""What is right of a run whose one option is wrong, and the ends that it may come to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.testing import digits

#: Samples in a batch, and batches.
SIZE, COUNT = 8, 3


@dataclass(frozen=True)
class Right:
    """A result; with `trials`, one that something was tried for."""

    trials: bool = True


@dataclass(frozen=True)
class Refused:
    """One error of ours with these words, after no more trials than that."""

    words: str
    trials: int = 0


@dataclass(frozen=True)
class Own:
    """The user's own exception, raised in a function of theirs."""

    kind: type[BaseException]
    message: str = "mine"
    function: str = "act"
    cause: type[BaseException] | None = None
    note: str = ""


Comes = Right | Refused | Own


@dataclass
class Given:
    """A run on the way."""

    converter: MixedPrecision

    def set_up_rightly(self) -> None:
        """With every option as it should be."""
        converter = self.converter
        converter.model = tiny_net()
        converter.metric = "accuracy"
        converter.eval_dataloader = batches()
        converter.strategy = "basic"
        converter.objective = "modelsize"
        converter.early_stopping = False
        converter.cache = False
        converter.accuracy_criterion = {"absolute": 1.0, "any_tolerance": True}
        converter.exit_policy = ExitPolicy(max_trials=1)


class Tiny(nn.Module):
    """One dense layer; [batch, 1, 8, 8] → 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


@cache
def tiny_net() -> nn.Module:
    torch.manual_seed(0)
    net = Tiny().eval()
    images, labels = (
        torch.from_numpy(values) for values in (digits()[0].images, digits()[0].labels)
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return net


@cache
def tiny_onnx() -> Any:
    from onnx import TensorProto, helper, numpy_helper

    net = tiny_net()
    weight = net.head.weight.detach().numpy()  # type: ignore[union-attr]
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], "flat"),
        helper.make_node("Gemm", ["flat", "w"], ["y"], "y", transB=1),
    ]
    input_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 8, 8])
    output_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = [numpy_helper.from_array(weight, "w")]
    return helper.make_model(
        helper.make_graph(nodes, "graph", [input_info], [output_info], weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )


@cache
def tiny_keras() -> Any:
    import keras

    net = keras.Sequential([keras.Input((1, 8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)])
    source = tiny_net().head
    net.layers[-1].set_weights(
        [source.weight.detach().numpy().T, source.bias.detach().numpy()]  # type: ignore[union-attr]
    )
    return net


def batches(count: int = COUNT) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of (images, labels)."""
    images, labels = digits()[1].images, digits()[1].labels
    starts = range(0, count * SIZE, SIZE)
    return [(images[s : s + SIZE], labels[s : s + SIZE]) for s in starts]


class OwnError(Exception):
    """A user's."""


class NeedsTwoError(Exception):
    """Python cannot copy it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}{second}")


def fit_metric(update: Any = None, result: Any = None, reset: Any = None) -> Any:
    """A metric that is right but for what is given in place of a method."""

    class Metric:
        higher_is_better = True

        def __init__(self) -> None:
            self.right = self.all = 0
            for name, method in (("update", update), ("result", result), ("reset", reset)):
                if method is not None:
                    setattr(self, name, method)

        def reset(self) -> None:
            self.right = self.all = 0

        def update(self, preds: Any, labels: Any) -> None:
            self.right += int((np.asarray(preds).argmax(1) == labels).sum())
            self.all += len(labels)

        def result(self) -> float:
            return self.right / max(self.all, 1)

    return Metric()


class After:
    """Acts from its n-th call on; before that it is right."""

    def __init__(self, calls: int, act: Any, right: Any = 1.0) -> None:
        self.left, self._act, self.right = calls, act, right

    def __call__(self, *_: Any) -> Any:
        self.left -= 1
        return self.right if self.left >= 0 else self._act()


def raiser(error: Any) -> Any:
    """A function that raises."""

    def act(*_: Any, **__: Any) -> Any:
        raise error() if isinstance(error, type) else error

    return act
