"""Train with Lipschitz regularization: a plain PyTorch loop with one more line.

python examples/plain_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import lipbound


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def train(weight: float, epochs: int = 8) -> tuple[nn.Module, float]:
    """Return the network and its accuracy on every fifth digit; ``weight`` is the penalty's λ."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    held = torch.arange(len(labels)) % 5 == 0

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    penalty = lipbound.Penalty(model, weight, floor=1.0)
    for _ in range(epochs):
        for batch in torch.randperm(int((~held).sum())).split(64):
            optimizer.zero_grad()
            logits = model(images[~held][batch])
            nn.functional.cross_entropy(logits, labels[~held][batch]).backward()
            penalty.add_grad_()  # the additional line
            optimizer.step()
    with torch.no_grad():
        right = model(images[held]).argmax(1) == labels[held]
    return model, float(right.float().mean())


def main() -> None:
    for weight in (0.0, 0.05):
        model, accuracy = train(weight)
        found = lipbound.audit(model, (1, 8, 8))
        print(f"λ = {weight:<4}  accuracy {accuracy:.3f}  network at most {found.upper:.3g}")


if __name__ == "__main__":
    main()
