"""Make PyPI's torchvision, which is built for CUDA, importable beside a CPU build of torch (`scripts/setup_images`).

A CPU build of torch cannot load torchvision's compiled operators. `import torchvision` then fails only because it
registers shapes for two of them. So this module declares these two first. Nothing that reads images uses them.
"""

import sys
from typing import Any


class DeclareOperators:
    """An import hook that finds no module itself. It declares the operators just before torchvision is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        self.library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self.library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        # Keep a reference: without one, torch would remove the declarations
        sys.modules[__name__].declared = self.library


sys.meta_path.insert(0, DeclareOperators())
