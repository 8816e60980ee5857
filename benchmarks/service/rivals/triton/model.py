"""tritonserver's python backend: the operation is the model's name. Complex numbers are pairs of FP32."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.operation = args["model_name"]

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        def given(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        if self.operation == "echo":
            d = given("A")
        elif self.operation == "product":
            a, b = (given(name).view(np.complex64)[..., 0] for name in "AB")
            d = (a @ b)[..., None].view(np.float32)
        else:
            a, b, c = (given(name).view(np.complex64) for name in "ABC")
            d = a * b[0]
            d += c
            d = d.view(np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("D", d)])
