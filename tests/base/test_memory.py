"""A batch for which memory ran out is named, with what to lower; the peak is that of the program itself."""

import subprocess
import sys

import pytest
import torch

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.base.memory import describe_batch, naming_the_batch

TARGETS = [{"image_id": i, "boxes": torch.zeros(i % 3, 4)} for i in range(18)]
BATCH = Batch(torch.zeros(18, 3, 2, 2, dtype=torch.uint8), torch.full((18, 2), 2), TARGETS)


def test_long_lists_of_a_batch_are_cut():
    described = describe_batch(BATCH)
    assert described.startswith("images (18, 3, 2, 2) uint8, 18 boxes [0, 1, 2, 0, 1,")
    assert described.endswith("14, 15] and 2 more")


@pytest.mark.parametrize(
    ("error", "under_way", "raised", "words"),
    [
        (RuntimeError("CUDA out of memory\nmore"), [BATCH], BadInput, "memory\n  micro-batch 0: images(.|\n)*lower it"),
        (RuntimeError("CUDA out of memory"), [], RuntimeError, "CUDA"),  # outside of a window
        (RuntimeError("another one"), [BATCH], RuntimeError, "another"),
    ],
)
def test_errors_name_the_batches_if_memory_ran_out(error, under_way, raised, words):
    with pytest.raises(raised, match=words), naming_the_batch(lambda: under_way, "lower it"):
        raise error


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says VmHWM, and has ru_maxrss survive exec")
def test_the_peak_is_not_that_of_the_starting_program():
    large = b"1" * 2**30
    program = "from toolkit.base.memory import peak_memory_mb; print(peak_memory_mb())"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert 100 < float(output) < len(large) / 2**20
