"""Random numbers that are pure functions of the seed, step, process and micro-batch, or of the seed, step and image.

No state of a generator has to be saved. The random numbers of an image do not depend on its micro-batch, its process,
or the order of processing.
"""

import hashlib
import random
from collections.abc import Iterable

import numpy as np
import torch

from toolkit.base.batch import Target

OUTSIDE_MICRO_BATCHES = 2**31  # a number that no micro-batch has


def seed_step(seed: int, step: int, rank: int, micro: int = 0) -> None:
    """Seed torch (CPU and accelerators), NumPy and Python as a pure function of the four numbers (all >= 0).

    If it is called before each forward, no generator state has to be saved: a resumed run draws the numbers of the
    uninterrupted one, and the ranks draw different numbers.
    """
    sequence = np.random.SeedSequence((seed, step, rank, micro))
    words = sequence.generate_state(4, np.uint32)
    torch_seed = int(words[0]) << 32 | int(words[1])
    python_seed = int(words[2]) << 32 | int(words[3])
    # As torch.manual_seed, which would take a millisecond to record it for absent accelerators.
    torch.default_generator.manual_seed(torch_seed)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        of_kind = torch.get_device_module(accelerator)
        seed_all = getattr(of_kind, "manual_seed_all", of_kind.manual_seed)  # MPS has the latter only
        seed_all(torch_seed)
    np.random.seed(words[2:])
    random.seed(python_seed)


def seed_images(targets: Iterable[Target], seed: int, step: int) -> None:
    """Make the random draws of `image_generator` for these targets a function of (seed, step, image id).

    Each target with an `image_id` is changed in place: it gets the entry `draws`. Other targets stay unchanged.
    """
    for target in targets:
        if "image_id" in target:
            target["draws"] = f"{seed} {step} {target['image_id']}"


def seed_micro_batch(targets: Iterable[Target], seed: int, step: int, rank: int, micro: int) -> None:
    """Seed all random draws for a micro-batch: call `seed_step` and `seed_images`.

    `seed_step` is for draws that do not belong to one image, such as dropout and denoising noise.
    """
    seed_step(seed, step, rank, micro)
    seed_images(targets, seed, step)


def image_generator(target: Target, what: str, device: torch.device | str = "cpu") -> torch.Generator | None:
    """Return a new generator on `device` for random draws that belong to one image, seeded by `seed_images`.

    Returns None, by which torch uses its default generator, for a target that `seed_images` has not changed.

    what: the purpose of the draws, such as "samples"; draws for different purposes are independent.
    """
    if "draws" not in target:
        return None
    text = f"{target['draws']} {what}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    return torch.Generator(device).manual_seed(seed)
