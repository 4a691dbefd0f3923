"""Let PyPI's torchvision, which is made for CUDA, be imported beside a CPU build of torch (`scripts/setup_images`).

Its compiled operators cannot be loaded there. `import torchvision` only fails because it registers shapes for two of them,
so these two are declared first. Nothing that reads images uses the operators.
"""

import sys
from typing import Any


class DeclareOperators:
    """A finder that finds nothing, but declares the operators before torchvision is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        self.library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self.library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        # Without a reference the library would withdraw its declarations
        sys.modules[__name__].declared = self.library


sys.meta_path.insert(0, DeclareOperators())
