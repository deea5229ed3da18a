"""Training batches and their random numbers, which depend only on the seed and the step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.data.sets import Data, Memory, Split, moved, moves
from lipbound.robust.training.augment import DRAWS, augmented
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.settings import Settings

ORDER, MOVES, START, CHECK = range(4)  # purposes of random numbers
AFTER = 1 << 40  # added to a step for the random numbers of its second augmentation
BLOCK = 1 << 24  # most numbers of random starts that are drawn from one seed
GOLDEN = 0x9E3779B97F4A7C15  # steps of this size modulo 2^63 spread the blocks' seeds


class Feed:
    """The training and held-out images, their order, augmentation and random starts.

    Args:
        chosen: Settings of the run.
        data: The data set.
        who: The processes of the run; each gets its part of every batch.
    """

    def __init__(self, chosen: Settings, data: Data, who: Team):
        if chosen.batch % (who.size * chosen.accumulate):
            whole = who.size * chosen.accumulate
            parts = f" × {chosen.accumulate} parts" if chosen.accumulate > 1 else ""
            processes = "process" if who.size == 1 else "processes"
            fit = max(whole, chosen.batch // whole * whole)
            raise ValueError(
                f"batch={chosen.batch} is not divisible by {who.size} {processes}{parts}; use a "
                f"multiple of {whole}, for example --set batch={fit}"
            )
        self.chosen, self.data, self.who = chosen, data, who
        count = min(len(data.train), chosen.first or len(data.train))
        held = round(chosen.held_out * count)
        order = torch.randperm(count, generator=self._draw(CHECK, 0))
        self.held, self.kept = order[:held], order[held:].sort().values
        self.per_epoch = len(self.kept) // chosen.batch
        if self.per_epoch == 0:
            raise ValueError(f"batch={chosen.batch} is more than {len(self.kept)} training images")
        self.train: Split = data.train
        if isinstance(data.train, Memory):
            self.train = data.train.to(who.device)
        compiled = chosen.compile and who.device.type == "cuda"
        self.augment = torch.compile(augmented, dynamic=False) if compiled else augmented
        self._coming: Iterator[tuple[Tensor, Tensor]] | None = None
        self.waited = 0.0  # seconds that steps waited for their images

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this process's part of the step's augmented images and labels, on the device.

        Steps must be requested in order.
        """
        chosen, mine = self.chosen, self.who.mine(self.chosen.batch)
        epoch, place = divmod(step, self.per_epoch)
        if self._coming is None or place == 0:
            order = torch.randperm(len(self.kept), generator=self._draw(ORDER, epoch))
            order = self.kept[order][: self.per_epoch * chosen.batch]
            parts = [part[mine] for part in order.split(chosen.batch)[place:]]
            seed = self._seed(MOVES, epoch) if chosen.augment else None
            self._coming = self.train.stream(parts, seed)
        start = time.perf_counter()
        images, labels = next(self._coming)
        self.waited += time.perf_counter() - start
        images = images.to(self.who.device, non_blocking=True)
        if chosen.augment and (self.data.crop or self.data.flip):
            shifts, mirrored = moves(chosen.batch, self.data.crop, self._draw(MOVES, step))
            flips = mirrored[mine] if self.data.flip else None
            border = "constant" if chosen.border == "zeros" else chosen.border
            images = moved(images, shifts[:, mine], flips, self.data.crop, border)
        images, labels = self.pixels(images, labels)
        if chosen.augment and (chosen.colour or chosen.randaugment):
            draw = torch.Generator(self.who.device).manual_seed(self._seed(MOVES, AFTER + step))
            numbers = torch.rand(DRAWS, chosen.batch, device=self.who.device, generator=draw)
            images = self.augment(images, numbers[:, mine], chosen.colour, chosen.randaugment)
        return images, labels

    def pixels(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Move images to the device, with pixels in [0, 1]."""
        device = self.who.device
        pixels = images.to(device, non_blocking=True).to(self.chosen.dtype) / 255
        if device.type == "cuda":
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return pixels, labels.to(device, non_blocking=True)

    def start(
        self, images: Tensor, purpose: int, index: int, first: int | None = None
    ) -> Tensor | None:
        """Draw random starts of an attack, or return ``None`` if attacks start at the images.

        The numbers depend on the image's place in the whole batch and not on the processes.

        Args:
            images: Images to attack.
            purpose: What the random numbers are for.
            index: Number of the batch.
            first: Place of the first image in the whole batch. By default the images are this
                process's part.
        """
        if not self.chosen.random_start:
            return None
        whole = self.chosen.batch
        first = self.who.mine(whole).start if first is None else first
        ball, draw = BALLS[self.chosen.ball], torch.Generator(self.who.device)
        each = min(whole, max(1, BLOCK // images[0].numel()))  # images of a block
        parts = []
        for block in range(first // each, -(-(first + len(images)) // each)):
            draw.manual_seed((self._seed(purpose, index) + block * GOLDEN) % (1 << 63))
            place = block * each
            # A block is drawn whole, because the size decides which number goes where.
            like = images[:1].expand(min(each, whole - place), -1, -1, -1)
            like = torch.empty_like(like, memory_format=torch.contiguous_format)
            found = ball.sample(like, self.chosen.radius, draw)
            parts.append(found[max(0, first - place) : first + len(images) - place])
        return torch.cat(parts)

    def _seed(self, purpose: int, index: int) -> int:
        return ((self.chosen.seed * 4 + purpose) * 100_000_007 + index) % (1 << 62)

    def _draw(self, purpose: int, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(purpose, index))
