# mypy: ignore-errors
"""The file that Triton loads: `model.py` of a model repository. It only hands over to `specrun.runner.triton.model`."""

import triton_python_backend_utils as pb_utils  # exists inside Triton's stub process only

from specrun.runner.triton.model import Model


class TritonPythonModel:
    def initialize(self, args):
        self._model = Model(pb_utils, args)

    def execute(self, requests):
        self._model.execute(requests)

    def finalize(self):
        self._model.finalize()
