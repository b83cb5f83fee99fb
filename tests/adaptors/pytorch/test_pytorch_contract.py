import numpy as np
import pytest
import torch

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import AdaptorContract, uniform

INT8, BF16 = Precision.INT8, Precision.BF16


class TestPyTorch(AdaptorContract):
    framework = "pytorch"
    input_name = "x"

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, net):
        return net

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, source, images) -> np.ndarray:
        with torch.no_grad():
            return source(torch.from_numpy(images)).numpy()

    def test_an_int8_plan_runs_integer_kernels(self, space, convert):
        """Every layer the plan has in INT8 is one integer kernel, and nothing else computes."""
        converted = convert(uniform(space, INT8))
        targets = [str(n.target) for n in converted.runnable_graph.graph.nodes if n.op == "call_function"]
        kernels = [t for t in targets if t.startswith("onednn.q")]
        assert len(kernels) == len(space.tunable_ops) == 7
        assert not [t for t in targets if "conv2d.default" in t or "linear.default" in t]

    def test_the_portable_form_computes_the_same(self, adaptor, space, convert, images):
        converted = convert(uniform(space, INT8))
        portable = converted.portable_graph(torch.from_numpy(images)).detach().numpy()
        np.testing.assert_allclose(adaptor.predict(converted, images), portable, atol=1e-4)

    def test_tensors_in_tensors_out(self, adaptor, model, images):
        assert isinstance(adaptor.predict(model, torch.from_numpy(images)), torch.Tensor)

    def test_the_users_model_keeps_its_weights_and_mode(self, adaptor, source, images):
        source.train()
        original = {name: value.clone() for name, value in source.state_dict().items()}
        adaptor.load(source, example=images)
        assert source.training
        assert source.drop.training
        assert all(
            torch.equal(value, original[name]) for name, value in source.state_dict().items()
        )
        source.eval()

    def test_ops_are_named_after_the_modules_they_come_from(self, space):
        names = [op.name for op in space.graph]
        assert {"stem", "block1.conv1", "block2.shortcut.0", "block1.add", "head"} <= set(names)

    def test_batch_norms_are_folded(self, space):
        assert not [op for op in space.graph if "norm" in op.type]

    def test_16_bits_go_where_torch_amp_would_have_them(self, all_machine):
        """Products are what torch.amp lowers; a loss, which it keeps in float32, is on no list."""

        class Mixed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.dense = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(4, 3)

            def forward(self, x):
                x = torch.relu(self.conv(x))
                return self.dense(
                    torch.nn.functional.smooth_l1_loss(x, x * 2, reduction="none").mean((2, 3))
                )

        model = (adaptor := PyTorchAdaptor()).load(Mixed().eval(), example=torch.ones(2, 1, 6, 6))
        space = adaptor.space(model, all_machine)
        plan = space.restricted_to([BF16]).fastest_plan()
        precisions = space.resolve(plan).effective
        runs_in = {op.type: precisions[op.name].value for op in space.graph}
        assert runs_in == {
            **dict.fromkeys(["conv2d", "relu", "mul", "linear"], "bf16"),
            **dict.fromkeys(["broadcast_tensors", "getitem"], "bf16"),
            **dict.fromkeys(["smooth_l1_loss", "mean"], "fp32"),
        }

    def test_products_are_what_torch_amp_lowers(self):
        """Torch's dispatcher has an autocast kernel for each of them."""
        lowered = {
            name.split("::")[1].split(".")[0]
            for name in torch._C._dispatch_get_all_op_names()
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")
        }
        adaptor = PyTorchAdaptor()
        products = {"conv1d", "conv2d", "conv3d", "linear", "matmul", "bmm", "mm", "addmm"}
        attention = {"scaled_dot_product_attention"}
        assert products | attention <= lowered & adaptor.amp_lists(BF16).allow
