"""Train a GAN whose critic is limited in one of three ways, and certify the critic on the way.

python examples/gan.py --arm lipbound                                       # digits, on a CPU
python examples/gan.py --arm wgan-gp --data DATA --steps 20000 --out RUN    # CIFAR-10, on a GPU

``lipbound`` limits the true norm of every layer of the critic to 1. ``spectral_norm`` divides every
kernel, reshaped to a matrix, by the norm of that matrix, which is not the norm of the convolution
(Miyato et al. 2018). Both have the hinge loss. ``wgan-gp`` limits no layer and adds the gradient
penalty to the Wasserstein loss (Gulrajani et al. 2017). Everything else is the same.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.nn.utils.parametrizations import spectral_norm

import lipbound
from lipbound.cuda_graphs import Repeated
from lipbound.files import append
from lipbound.robust.data import data_set
from lipbound.runtime import pick_device

ARMS = ("lipbound", "spectral_norm", "wgan-gp")
LATENT, BATCH, CRITIC_STEPS, AVERAGE = 128, 64, 2, 0.999


def critic_network(arm: str, shape: tuple[int, ...], width: int) -> nn.Sequential:
    """Halve the images to 4×4 pixels, as in Miyato et al.; limit the layers as the arm does."""
    channels, size = shape[0], shape[-1]
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.1)]
    while size > 4:
        layers += [nn.Conv2d(width, width, 4, 2, 1), nn.LeakyReLU(0.1)]
        layers += [nn.Conv2d(width, 2 * width, 3, padding=1), nn.LeakyReLU(0.1)]
        width, size = 2 * width, size // 2
    critic = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * width, 1))
    for layer in critic:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, 0.1)
            nn.init.zeros_(layer.bias)
            if arm == "spectral_norm":
                spectral_norm(layer)
    return lipbound.constrain(critic, norm=1.0, rtol=0.01) if arm == "lipbound" else critic


def generator_network(shape: tuple[int, ...], width: int) -> nn.Sequential:
    wide = width * shape[-1] // 4
    layers = [nn.Linear(LATENT, 16 * wide), nn.Unflatten(1, (wide, 4, 4))]
    while wide > width:
        layers += [nn.BatchNorm2d(wide), nn.ReLU(), nn.ConvTranspose2d(wide, wide // 2, 4, 2, 1)]
        wide //= 2
    layers += [nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, shape[0], 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers)


@torch.no_grad()
def sample(generator: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Return images as bytes; the same seed draws the same latent vectors on every device."""
    device = next(generator.parameters()).device
    latent = torch.randn(count, LATENT, generator=torch.Generator().manual_seed(seed))
    images = [generator(part.to(device)) for part in latent.split(1000)]
    return torch.cat(images).add(1).mul(127.5).round().to(torch.uint8)


def certified(critic: nn.Module, real: Tensor, fake: Tensor, gain: float) -> dict[str, object]:
    """Bound the critic, and measure the gradients that it has at some images.

    ``layers`` are the certified norms of the layers, ``constant`` is proved for the whole critic.
    """
    layers = [found.upper for found in lipbound.brackets(critic, 0.01).values()]
    images = torch.cat([real, fake]).requires_grad_()
    (slopes,) = torch.autograd.grad(critic(images).sum(), images)
    return {
        "layers": layers,
        "product": gain * math.prod(layers),
        "constant": gain * lipbound.audit(critic, tuple(real.shape[1:]), search=0).upper,
        "gradient": gain * float(slopes.flatten(1).norm(dim=1).mean()),
    }


def train(
    arm: str, seed: int, images: Tensor, out: Path, device: torch.device, *, steps: int,
    every: int, minutes: float, width: int, lr: float, scale: float,
) -> nn.Module:  # fmt: skip
    """Train one arm until ``steps`` or ``minutes`` are over; return the averaged generator.

    ``images`` are bytes. Every ``every`` steps the critic is bounded, and ``out`` gets a line in
    ``steps.jsonl`` and the weights of the averaged generator. ``scale`` is a factor of a limited
    critic's output, so its Lipschitz limit; for wgan-gp it is the weight of the penalty.
    """
    torch.manual_seed(seed)
    shape, penalty = tuple(images.shape[1:]), arm == "wgan-gp"
    gain = 1.0 if penalty else scale
    generator, averaged = (generator_network(shape, width).to(device) for _ in range(2))
    averaged.load_state_dict(generator.state_dict())
    averaged.eval()
    critic, proved = critic_network(arm, shape, width).to(device), critic_network(arm, shape, width)
    cuda, images = device.type == "cuda", images.to(device)
    for network in (generator, averaged, critic):
        network.to(memory_format=torch.channels_last)
    optimizers = [
        torch.optim.Adam(network.parameters(), lr, (0.0, 0.9), fused=cuda, capturable=cuda)
        for network in (critic, generator)
    ]

    def draw() -> tuple[Tensor, Tensor]:
        chosen = images[torch.randint(len(images), (BATCH,), device=device)]
        return chosen.float() / 127.5 - 1, generator(torch.randn(BATCH, LATENT, device=device))

    def critic_loss(real: Tensor, fake: Tensor) -> Tensor:
        of_real, of_fake = (gain * critic(torch.cat([real, fake]))).chunk(2)
        if not penalty:
            return relu(1 - of_real).mean() + relu(1 + of_fake).mean()
        share = torch.rand(BATCH, 1, 1, 1, device=device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        excess = slopes.flatten(1).norm(dim=1) - 1
        return of_fake.mean() - of_real.mean() + scale * excess.square().mean()

    def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss.backward(inputs=optimizer.param_groups[0]["params"])  # not those of the other network
        optimizer.step()
        return loss.detach()

    def step() -> tuple[Tensor, Tensor]:
        for _ in range(CRITIC_STEPS):
            real, fake = draw()
            first = descend(critic_loss(real, fake.detach()), optimizers[0])
        second = descend(-gain * critic(draw()[1]).mean(), optimizers[1])
        for mean, value in zip(averaged.state_dict().values(), generator.state_dict().values(),
                               strict=True):  # fmt: skip
            if mean.is_floating_point():
                mean.lerp_(value, 1 - AVERAGE)
        return first, second

    repeated, began = Repeated(device), time.perf_counter()  # one CUDA graph for the whole step
    for done in range(1, steps + 1):
        losses = repeated(step)
        if done % 100 and done % every and done < steps:
            continue
        first, second = map(float, losses)  # waits for the GPU
        seconds = time.perf_counter() - began
        over = done == steps or seconds > 60 * minutes
        if done % every == 0 or over:
            proved.load_state_dict(critic.state_dict())
            real, fake = (part[:32].detach().cpu() for part in draw())
            found = certified(proved.eval(), real, fake, gain)
            torch.save(averaged.state_dict(), out / f"generator-{done}.pt")
            about = {"step": done, "seconds": seconds, "losses": [first, second], **found}
            append(out / "steps.jsonl", about)
            bound = f"losses {first:.3f} {second:.3f}, constant at most {found['constant']:.4g}"
            print(f"{arm} {seed}: step {done}, {bound}", flush=True)
        if over:
            break
    return averaged


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=ARMS, default="lipbound")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10; without it, small digits")
    for name, value in {"seed": 0, "steps": 200, "every": 100, "minutes": math.inf, "width": 64,
                        "lr": 2e-4, "scale": 10.0}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("runs/gan"))
    given = vars(parser.parse_args())
    for name in ("steps", "every", "width"):
        if given[name] < 1:
            parser.exit(2, f"--{name} {given[name]} must be at least 1\n")
    folder, device = given.pop("data"), pick_device(given.pop("device"))
    data = data_set("packed-cifar10" if folder else "digits", folder)
    given["out"].mkdir(parents=True, exist_ok=True)
    generator = train(images=data.train.images, device=device, **given)
    torch.save(sample(generator, 64), given["out"] / "samples.pt")


if __name__ == "__main__":
    main()
