"""Train with the penalty in Lightning: a callback adds its gradient before every step.

pip install "lipbound[lightning,digits]"
python examples/lightning_module.py
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lipbound
from lipbound.lightning import LipschitzPenalty


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def main() -> None:
    lightning.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, held = torch.utils.data.random_split(data, [1500, 297])
    penalty = LipschitzPenalty(0.05)
    trainer = lightning.Trainer(
        max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[penalty],
    )  # fmt: skip
    module = Digits()
    trainer.fit(module, DataLoader(train, 64, shuffle=True), DataLoader(held, 297))
    found = lipbound.audit(module.network, (1, 8, 8))
    seen = {name: round(float(value), 3) for name, value in trainer.callback_metrics.items()}
    print(f"accuracy {seen['accuracy']}  network at most {found.upper:.3g}  {seen}")


if __name__ == "__main__":
    main()
