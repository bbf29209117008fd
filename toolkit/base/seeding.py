"""Random numbers that belong to an image: independent of the micro-batch, process and order it is processed in."""

import hashlib
from collections.abc import Iterable

import torch

from toolkit.base.batch import Target
from toolkit.base.distributed import seed_step


def seed_images(targets: Iterable[Target], seed: int, step: int) -> None:
    """Make all random draws for an image in training a function of (seed, step, image id), see `image_generator`."""
    for target in targets:
        if "image_id" in target:
            target["draws"] = f"{seed} {step} {target['image_id']}"


def seed_micro_batch(targets: Iterable[Target], seed: int, step: int, rank: int, micro: int) -> None:
    """Seed the draws that belong to no image, dropout and denoising noise, by `seed_step`, and call `seed_images`."""
    seed_step(seed, step, rank, micro)
    seed_images(targets, seed, step)


def image_generator(target: Target, what: str, device: torch.device | str = "cpu") -> torch.Generator | None:
    """Return a generator on `device` for an image that `seed_images` has seen; None (torch's own) for any other.

    what: the purpose of the draws; those of different purposes are independent.
    """
    if "draws" not in target:
        return None
    digest = hashlib.blake2b(f"{target['draws']} {what}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
