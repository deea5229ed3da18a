"""Write docs/results/imagenet.md: data of ImageNet's size, and what the paper's recipe needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lipbound.report.markdown import table
from lipbound.robust.training.settings import settings
from tools.pages import DOCS, lines, record, write

IMAGES = 1_281_167  # of ImageNet-1k's training set
WARM = 6  # steps from shards before a measurement
WEIGHTS = 44.5e6  # of ResNet-101
GIB = 139  # of a GPU


def rows() -> list[dict[str, Any]]:
    """The measurements, by the number of images of a part."""
    found = lines("imagenet-training")
    return sorted(found, key=lambda r: (r["batch"] // r["accumulate"], r["batch"], r["steps"]))


def share(found: dict[str, Any]) -> float:
    """Images per second from shards, as a share of those from memory."""
    rates: list[float] = [found[kind]["images_per_second"] for kind in ("shards", "memory")]
    return rates[0] / rates[1]


def claims() -> list[list[str]]:
    """Lines for the index."""
    shares = [share(r) for r in rows()]
    folder, shards = (record("index")[kind]["first start"] for kind in ("folder", "shards"))
    return [[
        "Adversarial training from shards at 224 pixels is almost as fast as from memory (H200).",
        f"{100 * min(shares):.1f} to {100 * max(shares):.1f} % of the images per second, for parts of 64 to 256 images",
        "[ImageNet](imagenet.md)",
    ], [
        "The index of 1.28 million images is made once (empty files on a local disk, two busy cores).",
        f"folder {folder['seconds']:.1f} s and {folder['mebibytes']:.0f} MiB, shards {shards['seconds']:.0f} s",
        "[ImageNet](imagenet.md#the-index)",
    ]]  # fmt: skip


def measured(found: list[dict[str, Any]]) -> str:
    header = ["images per step", "parts per step", "gradients exchanged", "measured steps",
              "images/s from memory", "images/s from shards", "share", "waiting",
              "images/s from memory, without CUDA graphs", "GPU memory without CUDA graphs",
              "GPU memory with them"]  # fmt: skip
    return table(header, [
        [
            f"{r['batch']}", f"{r['accumulate']}", "yes" if r["exchange"] else "no",
            f"{r['steps'] - WARM}", f"{r['memory']['images_per_second']:.0f}",
            f"{r['shards']['images_per_second']:.0f}", f"{100 * share(r):.1f} %",
            f"{100 * r['shards']['waited']:.1f} %",
            f"{r['without_graphs']['images_per_second']:.0f}",
            f"{r['without_graphs']['memory_gib']:.1f} GiB",
            f"{r['with_graphs']['memory_gib']:.1f} GiB",
        ]
        for r in found
    ])  # fmt: skip


def plan(found: list[dict[str, Any]]) -> str:
    """What 8 and 64 GPUs need for the recipe, at the measured rate of one GPU."""
    chosen = settings("at+lipreg", "paper-imagenet")
    images = IMAGES * (1 - chosen.held_out) * chosen.epochs
    rows = []
    for count in (8, 64):
        part = chosen.batch // count
        own = max((r for r in found if r["batch"] == part), key=lambda r: r["exchange"])
        rate = own["shards"]["images_per_second"]
        step = part / rate
        rows.append([
            f"{count}", f"{part}", f"`accumulate={own['accumulate']}`", f"{count * rate:,.0f}",
            f"{images / (count * rate) / 3600:.1f} h", f"{1000 * step:.0f} ms",
            f"{2 * 4 * WEIGHTS / step / 1e9:.1f} GB/s",
            f"{own['with_graphs']['memory_gib']:.0f} of {GIB} GiB",
        ])  # fmt: skip
    header = ["GPUs", "images a GPU and step", "setting", "images/s", "80 epochs", "a step",
              "exchange, per GPU", "memory"]  # fmt: skip
    return table(header, rows)


def page(found: list[dict[str, Any]]) -> str:
    shares = [share(r) for r in found]
    checked = next(r for r in found if "check" in r)
    index = record("index")
    times = [
        [
            {"folder": "image folder", "shards": "shards"}[kind],
            f"{own['first start']['seconds']:.1f} s", f"{own['first start']['mebibytes']:.0f} MiB",
            f"{own['next start']['seconds']:.1f} s", f"{own['next start']['mebibytes']:.0f} MiB",
            f"{own['mebibytes on disk']:.0f} MiB",
        ]
        for kind, own in index.items() if isinstance(own, dict)
    ]  # fmt: skip
    first = found[0]
    return f"""# Data and recipe of ImageNet's size

Adversarial training reads shards at {100 * min(shares):.1f} to {100 * max(shares):.1f} % of the speed that it reaches with images in memory, for parts of 64 to 256 images on one {first["device"]}. Several GPUs were not available: what 8 and 64 of them need is calculated below from one. ImageNet was not available either: the images are synthetic, so accuracies mean nothing.

## Throughput

The recipe is the preset `paper-imagenet`: {first["model"]}, {first["size"]} pixels, PGD with {first["pgd_iterations"]} steps, penalty, averaged weights, bfloat16, compiled. The shards hold 20,000 JPEGs of 400×500 pixels and about 93 KB, on the machine's own disk and mostly in its cache. {min(r["workers"] for r in found)} or {max(r["workers"] for r in found)} worker processes decode them on 16 cores. Blocks of steps from memory and from shards alternate. Five blocks of each were measured. *Share* compares all images and all time from shards with those from memory. *Waiting* is the share of the time in which a step waits for its images. At the time of these measurements each step also waited for the GPU, so that batches were not prepared meanwhile; this is mended, and was not measured again.

{measured(found)}

*Gradients exchanged* says whether they went through DistributedDataParallel and NCCL, here with one process. It costs nothing that can be seen, but there was no other process to wait for. CUDA graphs of the attack matter for small parts, whose kernels are short, and need little memory. A check of {settings("at+lipreg", "paper-imagenet").check:,} held-out images with PGD-10 took {checked["check_seconds"]:.0f} s, with compilation.

## A plan for 8 and 64 GPUs

The plan multiplies the rate of one GPU, from shards, by the number of GPUs. It counts training steps on {100 * (1 - settings("at+lipreg", "paper-imagenet").held_out):.0f} % of ImageNet's {IMAGES:,} training images, without compilation, checks, checkpoints and the final test. It assumes that the exchange is hidden behind the backward pass, which was not measured. The exchange needs the bandwidth in the table: a ring sends each of the {WEIGHTS / 1e6:.1f} million gradients twice in a step, in float32.

{plan(found)}

The rates were reached with {min(r["workers"] for r in found)} or {max(r["workers"] for r in found)} decoding processes for the GPU, so each GPU needs about as many cores, and a store that delivers what it reads: at 93 KB an image, {0.093 * max(r["shards"]["images_per_second"] for r in found):.0f} MB/s for each GPU. With fewer GPUs, keep the batch with more parts: one GPU has the same batch of 4,096 with `--set accumulate=16`.

## The index

lipbound notes once where every image is. The test has 1,000 folders of 1,281 empty files each, and as many samples of a few bytes in shards; larger ones were not measured.

{table(["data", "first start", "memory", "next start", "memory", "on disk"], times)}

The first start on shards reads every header, here on {index["processors"]} busy cores; it is shared among up to 16 processes. Memory is what the process needs above its imports.

```sh
python -m benchmarks.imagenet_training --folder FOLDER --workers 14 --batch 64 --steps 200 --no-check --out FILE
python -m benchmarks.imagenet_training --folder FOLDER --workers 14 --batch 256 --steps 200 --out FILE
python -m benchmarks.imagenet_training --folder FOLDER --workers 15 --batch 256 --steps 320 --no-check --out FILE
torchrun --nproc-per-node 1 -m benchmarks.imagenet_training --folder FOLDER --workers 14 --batch 512 --accumulate 2 --steps 30 --no-check --out FILE
python -m benchmarks.index --place FOLDER --out benchmarks/records/index.json
```

[Train a network](../guides/train.md#several-gpus-and-machines) has the commands for training. All numbers come from the records in `benchmarks/records`, and `make pages` writes this page from them.
"""


def main(folder: Path = DOCS) -> None:
    write(folder / "results" / "imagenet.md", page(rows()))


if __name__ == "__main__":
    main()
