import numpy as np
import pytest
from contract_nets import Normed, Outliers, Residual, TwoOutputs, seeded
from onnx_nets import as_onnx, graph, op

from neural_mp.errors import PlanError
from neural_mp.testing import FACTOR, CorrectionCase, CorrectionContract


class TestCorrections(CorrectionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        return as_onnx(seeded(Outliers))

    @pytest.fixture(scope="class")
    @classmethod
    def residual(cls):
        return as_onnx(seeded(Residual))

    @pytest.fixture(scope="class")
    @classmethod
    def two_outputs(cls):
        return as_onnx(seeded(TwoOutputs))

    @pytest.fixture(scope="class")
    @classmethod
    def normed(cls):
        model = as_onnx(seeded(Normed))
        if not model.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
            pytest.skip("this torch exports the net with a fixed batch")
        return model


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def outlier(weight: np.ndarray, axis: int) -> np.ndarray:
    """A weight with one channel that is much larger than the rest."""
    scales = np.ones(weight.shape[axis], np.float32)
    scales[3] = FACTOR
    return weight * scales.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])


A, B = outlier(draw(8, 8), 1), draw(8, 8, seed=1)
BIAS, DATA = draw(8, seed=2), draw(128, 8, 8, seed=3)
#: Outliers in the order of an untransposed product, in that of a transposed one, and of a filter.
CONSTANTS = {"a": A, "t": A.T.copy(), "b": B, "k": outlier(draw(8, 8, 3), 0), "bias": BIAS}


def between(first, *nodes, second="MatMul", shape=("n", 8, 8), **constants):
    """`x` → first → a ReLU → `b`, or what stands between them instead."""
    nodes = nodes or (op("Relu", "p", "r"),)
    last = op(second, "r k" if second == "Conv" else "r b", "y")
    model = graph([*first, *nodes, last], {"x": list(shape)}, ["y"], {**CONSTANTS, **constants})
    return CorrectionCase(model, DATA[:, :, 0] if len(shape) == 2 else DATA)


FLAT = ("n", 8)
PLAIN = op("MatMul", "x a", "p")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(lambda: between([PLAIN]), id="no bias"),
        pytest.param(
            lambda: between([op("MatMul", "x a", "q"), op("Add", "row q", "p")], row=BIAS[None]),
            id="bias of two axes, from the left",
        ),
        pytest.param(
            lambda: between([op("Gemm", "x t bias", "p", transB=1)], shape=FLAT),
            id="transposed",
        ),
        pytest.param(
            lambda: between([op("Gemm", "x a one", "p")], shape=FLAT, one=np.float32([0.5])),
            id="one number as the bias of all",
        ),
        pytest.param(
            lambda: between([op("MatMul", "x a", "p")], op("LeakyRelu", "p", "r", alpha=0.3)),
            id="leaky",
        ),
    ],
)
def test_products_of_every_form_are_scaled(case):
    case = case()
    assert case.best
    plain, corrected = (case.run(case.in_fp32(plan)) for plan in (case.plain, case.corrected))
    np.testing.assert_allclose(corrected, plain, rtol=1e-3, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(lambda: between([PLAIN], second="Conv"), id="over other axes"),
        pytest.param(
            lambda: between([op("Conv", "x k", "p", pads=[1, 1])]), id="over other axes, again"
        ),
        pytest.param(
            lambda: between([PLAIN], op("MaxPool", "p", "r", kernel_shape=[3], pads=[1, 1])),
            id="channels pooled together",
        ),
        pytest.param(lambda: between([PLAIN], op("ThresholdedRelu", "p", "r")), id="threshold"),
        pytest.param(
            lambda: between(
                [op("ReduceMean", "x", "m", keepdims=0), op("Gemm", "x a m", "p")], shape=FLAT
            ),
            id="computed bias",
        ),
        pytest.param(
            lambda: between([op("Gemm", "x a c", "p")], shape=(128, 8), c=draw(128, 1)),
            id="bias of every row",
        ),
    ],
)
def test_no_correction_where_the_function_would_change(case):
    case = case()
    assert not case.observed.corrected_nsr
    with pytest.raises(PlanError, match="'y'"):
        case.convert(case.with_corrections_of("y", "smooth"))


def test_a_constant_that_two_products_read_is_scaled_for_each():
    model = graph(
        [op("MatMul", "x a", "p"), op("Relu", "p", "r"), op("MatMul", "r a", "y")],
        {"x": ["n", 8, 8]},
        ["y"],
        {"a": A},
    )
    case = CorrectionCase(model, DATA)
    assert case.best
    output = case.run(case.in_fp32(case.corrected))
    np.testing.assert_allclose(output, case.reference, 1e-3, 1e-5 * np.abs(case.reference).max())
