"""The commands on an ONNX file."""

import onnx
import pytest
from command_cases import CommandCases

pytestmark = pytest.mark.slow


class TestOnnx(CommandCases):
    convolution = "Conv"

    @pytest.fixture(scope="class")
    @classmethod
    def file(cls, _exported, tmp_path_factory):
        path = tmp_path_factory.mktemp("onnx") / "net.onnx"
        onnx.save(_exported["small"], path)
        return path
