"""Compare three ways to limit the critic of a GAN, by the Fréchet distance of its samples.

    python -m benchmarks.gan --folder DATA --out RUNS --record FILE --picture FILE.png
    python -m benchmarks.gan --out RUNS --seeds 0 --steps 40 --every 20 --width 8    # on digits

First every arm of examples/gan.py is trained briefly with each of the settings in ``CHOICES`` and
with a seed that is not reported. The setting whose samples are closest to training images is then
trained with each of ``--seeds``. The runs of a stage go side by side, on one GPU, and all end after
the same time. The distance is the one between two normal distributions with the means and
covariances of features (Heusel et al. 2017). The features are those before the last layer of a
classifier that is trained here. 10,000 samples are compared with all test images. As reference, as
many training images are. Runs that are complete in ``--out`` are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from examples import gan
from lipbound.files import append, provenance, read, read_json, write
from lipbound.robust.data import data_set
from lipbound.robust.data.sets import Data
from lipbound.robust.training.loop import train
from lipbound.robust.training.settings import settings
from lipbound.robust.training.trained import load_trained
from lipbound.runtime import pick_device

ROOT = Path(__file__).resolve().parents[1]
# Learning rate of both networks, and the factor of the critic's output or the penalty's weight. The
# untrained critic of spectral_norm has gradients 23 times as large as the one of lipbound.
CHOICES: dict[str, list[tuple[float, float]]] = {
    "lipbound": [(lr, scale) for lr in (2e-4, 4e-4) for scale in (10.0, 30.0, 100.0)],
    "spectral_norm": [(lr, scale) for lr in (2e-4, 4e-4) for scale in (0.3, 1.0, 3.0)],
    "wgan-gp": [(lr, scale) for lr in (2e-4, 4e-4) for scale in (1.0, 3.0, 10.0)],
}
TUNING_SEED, COUNT, COLUMNS = 100, 10_000, 12
Moments = tuple[Tensor, Tensor]


class Features:
    """Features before the last Linear layer of a classifier, for images given as bytes."""

    def __init__(self, classifier: nn.Module, device: torch.device):
        self.classifier, self.device = classifier.to(device).eval(), device
        *_, last = (m for m in self.classifier.modules() if isinstance(m, nn.Linear))
        last.register_forward_pre_hook(self._keep)
        self.found: list[Tensor] = []

    def _keep(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.found.append(inputs[0].double().cpu())

    @torch.no_grad()
    def moments(self, images: Tensor) -> Moments:
        """Return the mean and the covariance of the features, in float64."""
        self.found.clear()
        for part in images.split(1000):
            self.classifier(part.to(self.device).float() / 255)
        features = torch.cat(self.found)
        return features.mean(0), torch.cov(features.mT)


def root(matrix: Tensor) -> Tensor:
    """Return the square root of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT


def frechet(one: Moments, two: Moments) -> float:
    """Return the Fréchet distance of two normal distributions, squared as in the literature."""
    half = root(one[1])
    cross = torch.linalg.eigvalsh(half @ two[1] @ half).clamp_min(0).sqrt().sum()
    apart = (one[0] - two[0]).square().sum()
    return float(apart + one[1].trace() + two[1].trace() - 2 * cross)


def classifier(
    given: argparse.Namespace, data: Data, device: torch.device
) -> tuple[nn.Module, float]:
    """Train or load the classifier whose features are compared; return its test accuracy too."""
    place = given.out / "classifier"
    if not (place / "final.safetensors").is_file():
        changes: dict[str, Any] = {"held_out": 0.0, "check_attack": 0, "check_every": 10}
        if given.folder is not None:
            changes |= {
                "data": "packed-cifar10", "model": "wrn-16-4", "batch": 256, "compile": False,
                "minutes": given.classifier_minutes,
            }  # fmt: skip
        chosen = settings("baseline", "fast" if given.folder else "digits", certify=0.0, **changes)
        train(chosen, data, place, resume=True, device=device.type)
    accuracy = read_json(place / "summary.json")["final"]["test_accuracy"]
    print(f"classifier: test accuracy {accuracy:.4f}", flush=True)
    return load_trained(place / "final.safetensors").model, accuracy


@contextlib.contextmanager
def shared_gpu(device: str | None) -> Iterator[None]:
    """Let the kernels of several processes run at once (MPS), if NVIDIA's service starts.

    It must start before this process uses the GPU.
    """
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None or device == "cpu":
        yield
        return
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    trial = "import torch; torch.ones(9, device='cuda').sum().item()"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(names, folder))
        try:
            subprocess.run([program, "-d"], check=True, timeout=30)
            subprocess.run([sys.executable, "-c", trial], check=True, timeout=90)
            print("the processes share the GPU by MPS", flush=True)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"without MPS: {error}", flush=True)
            stop_service(program)
            for name in names:
                del os.environ[name]
        try:
            yield
        finally:
            if names[0] in os.environ:
                stop_service(program)


def stop_service(program: str) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([program], input=b"quit\n", check=False, timeout=60)


class Runs:
    """Trainings side by side, one process each."""

    def __init__(self, given: argparse.Namespace, device: torch.device):
        self.given, self.device = given, device
        self.running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self, place: Path, minutes: float, **options: object) -> None:
        """Start a training whose folder has no final mark yet."""
        if (place / "complete").exists():
            return
        place.mkdir(parents=True, exist_ok=True)
        (place / "steps.jsonl").unlink(missing_ok=True)
        given = self.given
        options |= {"minutes": minutes, "width": given.width, "steps": given.steps,
                    "every": given.every, "device": self.device.type, "out": place}  # fmt: skip
        if given.folder is not None:
            options["data"] = given.folder
        command = [sys.executable, "-m", "examples.gan"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.running.append((process, place))

    def wait(self) -> None:
        """Wait for all trainings, and mark those that succeed."""
        for process, place in self.running:
            if process.wait() == 0:
                (place / "complete").touch()
            else:
                last = (place / "log").read_text(errors="replace").splitlines()[-1:]
                print(f"{place.name} failed: {' '.join(last)}", flush=True)
        self.running.clear()


class Measure:
    """Distances of the generators of a run from a set of images."""

    def __init__(self, given: argparse.Namespace, features: Features, data: Data):
        self.given, self.features = given, features
        self.shape = tuple(data.test.images.shape[1:])
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
        # No more training images than test images: the distance depends on their number.
        self.count = min(COUNT, len(data.test))
        self.train = features.moments(data.train.images[order[: self.count]])
        self.test = features.moments(data.test.images[: self.count])

    def samples(self, place: Path, step: int, count: int) -> Tensor:
        """Return images of a generator; the same latent vectors for every generator."""
        generator = gan.generator_network(self.shape, self.given.width)
        weights = torch.load(place / f"generator-{step}.pt", map_location="cpu", weights_only=True)
        generator.load_state_dict(weights)
        return gan.sample(generator.to(self.features.device).eval(), count).cpu()

    def distance(self, place: Path, step: int, reference: Moments) -> float:
        found = self.features.moments(self.samples(place, step, self.count))
        distance = frechet(found, reference)
        return distance if math.isfinite(distance) else math.inf


def tuned(given: argparse.Namespace, measure: Measure) -> dict[str, dict[str, Any]]:
    """Choose the setting of every arm whose last samples are closest to training images."""
    chosen = {}
    for arm, choices in CHOICES.items():
        tried = []
        for lr, scale in choices:
            place = given.out / "tuning" / f"{arm}-{lr:g}-{scale:g}"
            steps = read(place / "steps.jsonl")
            if steps:
                last = steps[-1]["step"]
                distance = measure.distance(place, last, measure.train)
                tried.append({"lr": lr, "scale": scale, "step": last, "distance": distance})
                print(f"{arm}: {tried[-1]}", flush=True)
        if not tried:
            sys.exit(f"no training of {arm} succeeded; see the logs in {given.out / 'tuning'}")
        best = min(tried, key=lambda one: one["distance"])
        chosen[arm] = {"lr": best["lr"], "scale": best["scale"], "tried": tried}
    return chosen


def picture(path: Path, rows: list[Tensor]) -> None:
    """Write images as a PNG of 256 colours, one row for each tensor."""
    images = torch.cat([torch.nn.functional.pad(row, (1, 1, 1, 1), value=255) for row in rows])
    count, channels, height, width = images.shape
    tiles = images.reshape(-1, COLUMNS, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = tiles.reshape(count // COLUMNS * height, COLUMNS * width, channels)
    pixels = pixels.expand(-1, -1, 3).contiguous()
    place = path.with_suffix(".part.png")
    Image.fromarray(pixels.numpy()).quantize(256).save(place, optimize=True)
    write(path, place.read_bytes())
    place.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="folder of CIFAR-10; without it, digits")
    parser.add_argument("--out", type=Path, default=Path("runs/gan-benchmark"))
    parser.add_argument("--record", type=Path, help="append the records to this JSON-lines file")
    parser.add_argument("--picture", type=Path, help="write samples to this PNG")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=6.5, help="of each reported training")
    parser.add_argument("--tuning-minutes", type=float, default=2.0)
    parser.add_argument("--classifier-minutes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=2000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device")
    given = parser.parse_args()
    given.out, given.folder = given.out.resolve(), given.folder and given.folder.resolve()
    started = given.out / "started"
    if not started.exists():
        write(started, str(time.time()).encode())
    began = float(started.read_text())
    data = data_set("packed-cifar10" if given.folder else "digits", given.folder)
    with shared_gpu(given.device):
        device = pick_device(given.device)
        runs, (network, accuracy) = Runs(given, device), classifier(given, data, device)
        for arm, choices in CHOICES.items():
            for lr, scale in choices:
                runs.start(
                    given.out / "tuning" / f"{arm}-{lr:g}-{scale:g}", given.tuning_minutes,
                    arm=arm, seed=TUNING_SEED, lr=lr, scale=scale,
                )  # fmt: skip
        measure = Measure(given, Features(network, device), data)
        runs.wait()
        chosen = tuned(given, measure)
        places = {
            (arm, seed): given.out / f"{arm}-{seed}" for arm in chosen for seed in given.seeds
        }
        for (arm, seed), place in places.items():
            best = {name: chosen[arm][name] for name in ("lr", "scale")}
            runs.start(place, given.minutes, arm=arm, seed=seed, **best)
        runs.wait()
        about = {"accuracy": accuracy, **provenance(str(device))}
        report(given, data, measure, chosen, places, about, began)


def report(
    given: argparse.Namespace, data: Data, measure: Measure, chosen: dict[str, dict[str, Any]],
    places: dict[tuple[str, int], Path], about: dict[str, Any], began: float,
) -> None:  # fmt: skip
    """Measure the distances of all trainings, print them, and write the records and the picture."""
    common = {"experiment": "gan", "data": "cifar10" if given.folder else "digits"}
    sizes = {"width": given.width, "batch": gan.BATCH, "critic_steps": gan.CRITIC_STEPS}
    records, last = [], {}
    for (arm, seed), place in places.items():
        steps = read(place / "steps.jsonl")
        for step in steps:
            step["distance"] = measure.distance(place, step["step"], measure.test)
        if not steps:
            continue
        last[arm, seed] = steps[-1]["step"]
        best = {name: chosen[arm][name] for name in ("lr", "scale")}
        records.append(
            {**common, "kind": "run", "arm": arm, **best, **sizes, "steps": steps, **about}
            | {"seed": seed}
        )
        print(f"{arm} {seed}: {[(s['step'], round(s['distance'], 2)) for s in steps]}", flush=True)
    reference = {
        **common, "kind": "reference", "train_to_test": frechet(measure.train, measure.test),
        "images": measure.count, "features": len(measure.test[0]), "tuning": chosen,
        "tuning_minutes": given.tuning_minutes, "minutes": given.minutes,
        "classifier_minutes": given.classifier_minutes,
        "wall_seconds": time.time() - began, **about,
    }  # fmt: skip
    print(f"training images: {reference['train_to_test']:.3f}, "
          f"{reference['wall_seconds'] / 60:.1f} minutes in all", flush=True)  # fmt: skip
    if given.record is not None:
        for record in (reference, *records):
            append(given.record, record)
    if given.picture is not None:
        rows = [data.test.images[: 2 * COLUMNS]]
        for arm in chosen:
            key = (arm, given.seeds[0])
            if key in last:
                rows.append(measure.samples(places[key], last[key], 2 * COLUMNS))
        picture(given.picture, rows)


if __name__ == "__main__":
    main()
