"""See `DeploymentContract`."""

import numpy as np
import onnx
import pytest
from onnx_nets import run

from neural_mp.testing import DeploymentContract

pytestmark = pytest.mark.slow


class TestOnnxDeployment(DeploymentContract):
    heeds_onednn = False

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls, net):
        return net

    def test_a_file_says_where_it_is_right(self, made_for, tmp_path):
        for target, text in (("vnni", "VNNI"), ("portable", "every CPU")):
            made_for(target).result.save(tmp_path / f"{target}.onnx")
            properties = onnx.load(tmp_path / f"{target}.onnx").metadata_props
            metadata = {item.key: item.value for item in properties}
            assert text in metadata["neural_mp.exact_on"]

    def test_unsigned_weights_are_the_same_numbers(self, made_for, tmp_path):
        case = made_for("vnni")
        adaptor, model = case.result.adaptor, case.result.held
        unsigned = adaptor.portability.with_reduced_range(model)
        assert adaptor.portability.full_range_kernels(model)
        assert not adaptor.portability.full_range_kernels(unsigned)
        types = {t.data_type for t in adaptor.native(unsigned).graph.initializer}
        assert onnx.TensorProto.INT8 not in types
        adaptor.single_file.save_file(unsigned, tmp_path / "unsigned.onnx", {})
        path = str(tmp_path / "unsigned.onnx")
        name = onnx.load(path).graph.input[0].name
        (output,) = run(path, **{name: case.images})
        np.testing.assert_array_equal(output, adaptor.predict(unsigned, case.images))
