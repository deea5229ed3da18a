"""Write lipbound/data/networks.json: the shapes of the layers of 17 networks of torchvision.

``python -m tools.networks`` needs torchvision. The package contains the table, so that its users
do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from lipbound.modules import input_shapes
from lipbound.paper.networks import NAMES

INPUT = (3, 224, 224)
FIELDS = (
    "name", "in", "out", "kernel", "stride", "padding", "dilation", "groups", "bias", "input",
)  # fmt: skip


def shapes(model: nn.Module) -> dict[str, Any]:
    """Return the shapes of a runnable model's layers, and each convolution's input size."""
    sizes = input_shapes(model, INPUT)
    modules = dict(model.named_modules())
    return {
        "convolutions": [
            [
                name, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding,
                m.dilation, m.groups, m.bias is not None, sizes[name][1:],
            ]
            for name, m in modules.items()
            if isinstance(m, nn.Conv2d)
        ],
        "norms": [m.num_features for m in modules.values() if isinstance(m, nn.BatchNorm2d)],
        "linears": [
            [m.in_features, m.out_features] for m in modules.values() if isinstance(m, nn.Linear)
        ],
    }  # fmt: skip


def main() -> None:
    import torchvision

    found = {name: shapes(getattr(torchvision.models, name)(weights=None)) for name in NAMES}
    record = {
        "made_by": "python -m tools.networks",
        "torchvision": torchvision.__version__,
        "convolution": FIELDS,
        "networks": found,
    }
    path = Path(__file__).resolve().parents[1] / "lipbound" / "data" / "networks.json"
    path.write_text(json.dumps(record, separators=(",", ":")))
    print(f"wrote {path.name}: {len(found)} networks")


if __name__ == "__main__":
    main()
