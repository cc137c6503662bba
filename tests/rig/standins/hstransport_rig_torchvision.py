"""Lets PyPI's torchvision be imported beside a torch that was built without CUDA.

SGLang imports torchvision at module level and uses it for images only. PyPI's wheel is a CUDA
build: its library does not load without libtorch_cuda, so the operators that its Python code wants
to annotate do not exist and the import dies. Declaring their schemas is enough; calling one still
raises. Imported by the virtual environment's .pth file in every process, so it must cost nothing
until torchvision is asked for.
"""

import sys
from importlib.abc import MetaPathFinder

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; declares the schemas when somebody looks for torchvision, then leaves."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()


def _declare():
    import torch

    if torch.version.cuda is None:
        for schema in _SCHEMAS:
            name, _, signature = schema.partition("(")
            torch.library.define(f"torchvision::{name}", f"({signature}")


sys.meta_path.insert(0, _BeforeTorchvision())
