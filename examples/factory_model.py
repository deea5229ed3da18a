"""Audit a network from another library, limit its layers, and audit it again.

pip install timm          # or: pip install pytorchcv
python examples/factory_model.py
"""

import copy

import torch
from torch import nn

import lipbound


def factory() -> tuple[str, nn.Module]:
    """Return an untrained ResNet-18 or ResNet-20 from timm or pytorchcv."""
    torch.manual_seed(0)
    try:
        import timm

        return "timm resnet18", timm.create_model("resnet18", pretrained=False, num_classes=10)
    except (ImportError, RuntimeError):  # RuntimeError: torchvision does not match torch
        from pytorchcv.models.resnet_cifar import resnet20_cifar10

        return "pytorchcv resnet20_cifar10", resnet20_cifar10(num_classes=10)


def main() -> None:
    name, model = factory()
    model.eval()
    found = lipbound.audit(model, (3, 32, 32))
    widest = max(found.layers, key=lambda row: row.bracket.upper)
    print(f"{name}: {len(found.layers)} layers, the network at most {found.upper:.4g}")
    print(f"largest gain: {widest.name}, {widest.bracket.lower:.5g} to {widest.bracket.upper:.5g}")

    limited = lipbound.constrain(copy.deepcopy(model), norm=1.0).eval()
    lipbound.unconstrain(limited)  # plain weights again, with norm at most 1 per layer
    after = lipbound.audit(limited, (3, 32, 32))
    print(f"every convolution and Linear layer at most 1: the network at most {after.upper:.4g}")
    images = torch.rand(2, 3, 32, 32)
    print(f"certified radii: {lipbound.certify(limited, after, images).tolist()}")


if __name__ == "__main__":
    main()
