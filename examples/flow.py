"""Train an invertible residual network as a density of 8×8 digits, with certified contractions.

pip install "lipbound[digits]" matplotlib
python examples/flow.py --out flow.jsonl --picture flow.png

A block x + g(x) is invertible if g is a contraction (Behrmann et al. 2019). ``constrain`` limits
the two layers of every g, and an audit proves its constant afterwards. RealNVP (Dinh et al. 2017)
and Gaussians are trained on the same digits for comparison.
"""

import argparse
import copy
import math
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn.utils.parametrize import cached

import lipbound
from lipbound.files import append, provenance

PIXELS, LEVELS = 64, 17
CONTRACTION = 0.95  # limit of each g
TOLERANCE = 1e-10  # for the inverse of a block


def images() -> tuple[Tensor, Tensor, Tensor]:
    """Digits with pixels from 0 to 16: to train on, to choose the best step by, and held out."""
    pixels = torch.tensor(load_digits().data, dtype=torch.float32)
    part = torch.arange(len(pixels)) % 10
    return pixels[part > 2], pixels[part == 2], pixels[part < 2]


def noisy(pixels: Tensor) -> Tensor:
    """Spread every level over an interval of length 1, so that densities make sense."""
    return pixels + torch.rand_like(pixels)


class Gaussian(nn.Module):
    """Make every pixel normal by its histogram, then all of them uncorrelated."""

    def __init__(self, train: Tensor):
        super().__init__()
        counts = torch.stack([(train == level).sum(0) for level in range(LEVELS)], 1) + 0.2
        self.register_buffer("share", counts / counts.sum(1, keepdim=True))
        below = torch.cat([torch.zeros(PIXELS, 1), self.share.cumsum(1)], 1)
        self.register_buffer("below", below / below[:, -1:])
        normal = torch.cat([self.normal(noisy(train))[0] for _ in range(20)])
        values, vectors = torch.linalg.eigh(torch.cov(normal.T))
        self.register_buffer("mean", normal.mean(0))
        root = vectors * values.sqrt() @ vectors.T
        self.register_buffer("root", (root + root.T) / 2)

    def normal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        level = x.long().clamp(0, LEVELS - 1)
        at = torch.arange(PIXELS).expand_as(level)
        shares = self.below[at, level] + (x - level) * self.share[at, level]
        z = torch.special.ndtri(shares.double().clamp(1e-12, 1 - 1e-12)).to(x)
        slopes = self.share[at, level].log() + z.square() / 2 + math.log(2 * math.pi) / 2
        return z, slopes.sum(1)

    def forward(self, x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
        z, logdet = self.normal(x)
        return torch.linalg.solve(self.root, (z - self.mean).T).T, logdet - self.root.logdet()

    def inverse(self, z: Tensor) -> Tensor:
        shares = torch.special.ndtr(z @ self.root + self.mean)
        level = torch.searchsorted(self.below[:, 1:-1].contiguous(), shares.T.contiguous()).T
        at = torch.arange(PIXELS).expand_as(level)
        return level + (shares - self.below[at, level]) / self.share[at, level]


class Residual(nn.Module):
    """x + g(x) after a learned scale: log |det| by a power series, or exact."""

    def __init__(self, width: int = 64, terms: int = 8):
        super().__init__()
        self.scale, self.terms = nn.Parameter(torch.zeros(PIXELS)), terms
        self.g = nn.Sequential(nn.Linear(PIXELS, width), nn.ELU(), nn.Linear(width, PIXELS))
        nn.init.normal_(self.g[2].weight, 0, 1e-3)  # start near the identity
        lipbound.constrain(self.g, norm=CONTRACTION**0.5)  # ELU has slopes in [0, 1]

    def forward(self, x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
        x = x * self.scale.exp()
        first, _, second = self.g
        inner, outer = first.weight, second.weight
        slopes = first(x).clamp(max=0).exp()  # of ELU; the Jacobian is outer · slopes · inner
        if exact:
            jacobian = outer * slopes[:, None] @ inner
            logdet = torch.linalg.slogdet(torch.eye(PIXELS).to(x) + jacobian).logabsdet
        else:  # log det(I + J) = tr J − tr J²/2 + …, and the mean of vᵀJv is tr J (Hutchinson)
            v = torch.randn_like(x)
            power, logdet = v, torch.zeros(len(x))
            for k in range(1, self.terms + 1):
                power = (power @ inner.T * slopes) @ outer.T
                logdet = logdet - (-1) ** k / k * (power * v).sum(1)
        return x + self.g(x), logdet + self.scale.sum()

    def inverse(self, y: Tensor, rate: float = CONTRACTION) -> Tensor:
        """Iterate x ← y − g(x) until the solution is proved to be near (Banach's theorem)."""
        x, self.iterations, change = y, 0, math.inf
        while change * rate / (1 - rate) > TOLERANCE:
            last, x = x, y - self.g(x)
            change, self.iterations = float((x - last).norm(dim=1).max()), self.iterations + 1
        return x * (-self.scale).exp()


class Coupling(nn.Module):
    """RealNVP: half of the values sets scale and shift of the others, so it takes two for all."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.order = torch.randperm(PIXELS)
        self.net = nn.Sequential(nn.Linear(PIXELS // 2, width), nn.ELU(), nn.Linear(width, PIXELS))
        nn.init.normal_(self.net[2].weight, 0, 1e-3)

    def forward(self, x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
        kept, changed = x[:, self.order].chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        return torch.cat([kept, changed * scale.tanh().exp() + shift], 1), scale.tanh().sum(1)


def log_density(flow: nn.Sequential, x: Tensor, exact: bool = True) -> Tensor:
    total = 0
    for block in flow:
        x, logdet = block(x, exact)
        total = total + logdet
    return total - x.square().sum(1) / 2 - PIXELS / 2 * math.log(2 * math.pi)


def bits(log_densities: Tensor) -> Tensor:
    """Bits per pixel; each level has an interval of length 1."""
    return -log_densities.mean() / PIXELS / math.log(2)


def train(flow: nn.Sequential, pixels: Tensor, chosen_by: Tensor, steps: int) -> None:
    """Train with new noise in every step, and keep the best of twelve states."""
    rate = 8e-3
    optimizer = torch.optim.AdamW(flow[1:].parameters(), rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    best, check = (math.inf, flow.state_dict()), torch.cat([noisy(chosen_by) for _ in range(4)])
    for step in range(1, steps + 1):
        batch = noisy(pixels[torch.randint(len(pixels), (256,))])
        optimizer.zero_grad()
        with cached():  # so that ``constrain`` measures each layer once a step
            bits(log_density(flow.train(), batch, exact=False)).backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 12) == 0:
            with torch.no_grad():
                now = float(bits(log_density(flow.eval(), check)))
            best = min(best, (now, copy.deepcopy(flow.state_dict())), key=lambda pair: pair[0])
    flow.load_state_dict(best[1])


@torch.no_grad()
def invert(flow: nn.Sequential, x: Tensor, rates: list[float]) -> dict:
    """Measure the inverse in float64, beside the number of iterations that the rates promise."""
    z, found = x, {"iterations": [], "promised": []}
    for block in flow:
        z, _ = block(z, True)
    for block, rate in zip(reversed(flow[1:]), reversed(rates), strict=True):
        distance = float(block.g(z).norm(dim=1).max())
        z = block.inverse(z, rate)
        needed = math.log(TOLERANCE * (1 - rate) / rate / distance) / math.log(rate)
        found["iterations"].insert(0, block.iterations)
        found["promised"].insert(0, 1 + math.ceil(needed))
    return {**found, "inverse_error": float((flow[0].inverse(z) - x).abs().max())}


@torch.no_grad()
def draw(path: Path, flow: nn.Sequential, full: MultivariateNormal, held: Tensor) -> None:
    """Draw held-out digits, samples of the flow and samples of the Gaussian, 40 each."""
    from matplotlib import image

    z = torch.randn(40, PIXELS, dtype=torch.float64)
    for block in reversed(flow):
        z = block.inverse(z)
    blocks = [held[:40], z.floor(), full.sample((40,)).floor()]
    tiles = [
        nn.functional.pad(b.clamp(0, 16).view(5, 8, 8, 8), (1, 1, 1, 1)).transpose(1, 2)
        for b in blocks
    ]
    walls = [nn.functional.pad(tile.reshape(50, 80).float(), (8, 8, 4, 4)) for tile in tiles]
    wall = torch.cat(walls, 1)
    image.imsave(path, wall.repeat_interleave(4, 0).repeat_interleave(4, 1), cmap="gray_r")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON-lines file to append the results to")
    parser.add_argument("--picture", type=Path, help="PNG file: digits, and samples of the flow")
    chosen = parser.parse_args(arguments)
    for name in ("steps", "blocks"):
        if (number := getattr(chosen, name)) < 1:
            parser.exit(2, f"--{name} {number} must be at least 1\n")
    torch.manual_seed(chosen.seed)
    pixels, chosen_by, held = images()
    drawn = torch.cat([noisy(held.double()) for _ in range(10)])
    plain = torch.cat([noisy(pixels.double()) for _ in range(20)])
    full = MultivariateNormal(plain.mean(0), torch.cov(plain.T))
    found, sizes = {"Gaussian": float(bits(full.log_prob(drawn)))}, {}
    start = Gaussian(pixels)
    found["histograms, then Gaussian"] = float(bits(log_density([start.double()], drawn)))

    for name, block, times in [("RealNVP", Coupling, 2), ("i-ResNet", Residual, 1)]:
        flow = nn.Sequential(start.float(), *(block() for _ in range(times * chosen.blocks)))
        sizes[name] = sum(parameter.numel() for parameter in flow.parameters())
        begin = time.process_time()
        train(flow, pixels, chosen_by, chosen.steps)
        seconds = time.process_time() - begin
        if block is Residual:
            lipbound.unconstrain(flow.eval())  # plain weights, with certified norms
        with torch.no_grad():
            found[name] = float(bits(log_density(flow.double(), drawn)))
    for name, value in found.items():
        print(f"{name:28} {value:.3f} bits per pixel on {len(held)} held-out digits")

    rates = [lipbound.audit(block.g, (PIXELS,)).upper for block in flow[1:]]
    inverse = invert(flow, drawn[: len(held)], rates)
    print(f"contractions, proved: at most {', '.join(f'{rate:.4f}' for rate in rates)}")
    print(f"inverse: error at most {inverse['inverse_error']:.1e} of a level in", end=" ")
    print(f"{inverse['iterations']} iterations a block, promised {inverse['promised']}")
    if chosen.picture:
        draw(chosen.picture, flow, full, held)
    if chosen.out:
        about = {"seed": chosen.seed, "steps": chosen.steps, "blocks": chosen.blocks}
        about |= {"parameters": sizes, "cpu_seconds": round(seconds, 1), "held": len(held)}
        measured = {"bits": found, "rates": rates, **inverse}
        append(chosen.out, {"experiment": "flow", **provenance("cpu"), **about, **measured})


if __name__ == "__main__":
    main()
