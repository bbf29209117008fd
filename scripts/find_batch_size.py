"""Find the largest batch that fits into memory: start training with smaller and smaller ones, for one step each.

    python scripts/find_batch_size.py scripts/train_detr.py --out batch.yaml
    python scripts/find_batch_size.py scripts/train_detr.py --config configs/detr/bccd.yaml --out batch.yaml --most 64

The file written is for `--config` of the training script, after the configuration for which the batch was found. Each
attempt runs the largest and the most crowded images of the data (`--run.probe_memory`) and an optimizer step. On a GPU
its memory is the limit; on a CPU, where the system would end the process instead of refusing memory, --memory-gib is.
If the settings have more images in an optimizer step than fit at once, the file sets `optim.accumulation_steps` so that
a step keeps at least this number. Arguments that are not listed below go to the training script.

Exit code 0: done, 2: bad input, or not even one image fits.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil

from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.run.settings_file import save_config
from toolkit.tools.arguments import Program, finite_number, whole_number
from toolkit.tools.interrupts import stop_signals_raise
from toolkit.tools.watch import WatchedRun, resolved_settings, steps_alone

TOO_FEW_IMAGES = "data.batch_size_per_device of at most"  # message of toolkit/data/sampling.py
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "MemoryError")
GIB = 2**30
MAX_GIB = 2**30  # an exbibyte; the system counts bytes in 64 bits


def obstacle(script: Path, arguments: list[str], batch_size: int, memory_bytes: int | None) -> str:
    """Return the reason why training cannot make its first step with this batch; "" if it can.

    memory_bytes: limit of the process; None: no limit. Raises BadInput if training ends for another reason than memory
    or too few images.
    """
    limit = None
    if memory_bytes is not None:
        import resource  # not on Windows

        limit = partial(resource.setrlimit, resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    settings = {
        "data.batch_size_per_device": batch_size,
        "data.workers": 0,
        "run.probe_memory": "true",
        "optim.accumulation_steps": 1,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        output = Path(scratch) / "output"
        command = steps_alone(script, arguments, folder, 2, settings)
        run = WatchedRun(command, folder, output, limit=limit)
        try:
            if any("train/loss" in row for row in run.rows()):
                return ""
        finally:
            run.stop(saving=False)  # the training is discarded
        text = output.read_text(errors="replace", encoding="utf-8")
    if run.process.returncode == -9 or any(phrase in text for phrase in OUT_OF_MEMORY):
        return "out of memory"
    if TOO_FEW_IMAGES in text:
        return "more than the data has"
    raise BadInput(f"the training ends before its first step, but not for lack of memory:\n{text[-2000:]}")


def find(arguments: argparse.Namespace, rest: list[str]) -> None:
    from toolkit.base.distributed import default_device  # takes seconds, so after parsing

    settings = resolved_settings(arguments.script, rest)
    largest = arguments.most
    why = "not tried"
    on_cpu = default_device().type == "cpu"
    if arguments.memory_gib is None and on_cpu:
        arguments.memory_gib = 0.8 * psutil.virtual_memory().available / GIB
    memory = int(arguments.memory_gib * GIB) if on_cpu else None
    if on_cpu and sys.platform == "win32":
        raise BadInput("Windows does not limit the memory of a process: without a GPU, choose the batch size yourself")
    while largest:
        print(f"{largest} images: ", end="", flush=True)
        refused = obstacle(arguments.script, rest, largest, memory)
        print(refused or "fits", flush=True)
        if not refused:
            break
        largest //= 2
        why = refused
    else:
        remedy = "give smaller images (data.image_size, data.scales), a smaller model, or --run.precision bf16"
        raise BadInput(f"not even one image fits into memory: {remedy}")
    asked = settings["data"]["batch_size_per_device"] * settings["optim"]["accumulation_steps"]
    overrides = {"data": {"batch_size_per_device": largest}}
    if asked > largest:
        overrides["optim"] = {"accumulation_steps": -(-asked // largest)}
    where = f"a CPU with {arguments.memory_gib:.1f} GiB" if on_cpu else "an accelerator"
    remarks = [
        f"Found by scripts/find_batch_size.py {arguments.script} {' '.join(rest)}",
        f"{largest} images fit into the memory of {where}; twice as many: {why}.",
        f"The settings have {asked} images in a step of one device.",
    ]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_config(overrides, arguments.out, remarks)
    print(f"data.batch_size_per_device {largest}; written: {arguments.out}")


@exit_on_bad_input
def main(argv: list[str] | None = None) -> None:
    parser = Program(__doc__, allow_abbrev=False)
    parser.add_argument("script", type=Path, help="training script, such as scripts/train_detr.py")
    parser.add_argument("--out", type=Path, default=Path("batch.yaml"), help="file to write (default batch.yaml)")
    most = "first batch size to try (default 256), then half"
    parser.add_argument("--most", type=whole_number(1), default=256, help=most)
    memory = "on a CPU: memory of the process (default: 80 %% of the free)"
    parser.add_argument("--memory-gib", type=finite_number(0, MAX_GIB), help=memory)
    with stop_signals_raise():
        find(*parser.parse_known(argv))


if __name__ == "__main__":
    sys.exit(main())
