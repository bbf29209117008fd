"""Sets up the processes of a run by Accelerate, sets their CPU threads, and prints their first lines of output."""

import os
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch.optim import Optimizer

from toolkit.base.distributed import all_reduce, cpu_is_requested, default_device
from toolkit.base.errors import BadInput
from toolkit.run.launcher import find_launch, launcher_precision

# How long processes wait for each other at the very start. Under torchrun, whose agent ends all when one dies, a slow
# file system may delay some; without it nobody says that one will never come.
MEET_S = {"alone": 60, "launcher": 600}
# Then the main process reads and checks all images of a data set while the others wait. A process that fails is
# noticed otherwise: `toolkit.run.watchdog`.
PREPARE_MIN = 120.0


RESTARTABLE = "restartable://"  # an `init_method` of torch


def _store_of_this_start(url: str, **options) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield torchrun's store with keys that are new for each restart (`--max-restarts`), with rank and world size.

    The store of torchrun keeps the keys of earlier starts, so that a fast process would connect to the old address of a
    slower one, see https://github.com/pytorch/pytorch/issues/135712. This works on one machine only, because several
    machines count their restarts differently.
    """
    store, rank, world_size = next(dist.rendezvous("env://", **options))
    yield dist.PrefixStore(f"start_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store), rank, world_size


dist.register_rendezvous_handler(RESTARTABLE.partition(":")[0], _store_of_this_start)


def start_accelerator(precision: str | None, **kwargs) -> Accelerator:
    """Connect the processes of the run and return their `Accelerator`.

    A second call only sets another precision; the processes stay connected.

    Args:
        precision: "no", "fp16" or "bf16"; None or "auto": the precision given to the launcher, else "no". On a CPU,
            "fp16" becomes "no".
        kwargs: further arguments of `Accelerator`.

    Raises:
        BadInput: another process does not start in time, or the GPUs asked for do not exist.
    """
    if precision in (None, "auto"):
        precision = launcher_precision(find_launch(), os.environ) or "no"
    if precision == "fp16" and default_device().type == "cpu":
        precision = "no"  # Accelerate would say fp16 and compute in float32
        is_first_call = not PartialState._shared_state
        if os.environ.get("RANK", "0") == "0" and is_first_call:
            note = "fp16 needs a GPU, so this run computes in float32; bf16 works on CPUs with instructions for it"
            print(note, flush=True)
    _refuse_absent_gpus()
    meet = MEET_S["launcher" if "TORCHELASTIC_RUN_ID" in os.environ else "alone"]
    meeting = {"timeout": timedelta(seconds=meet)}
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if "TORCHELASTIC_RESTART_COUNT" in os.environ and on_one_machine:
        meeting["init_method"] = RESTARTABLE
    if default_device().type == "cuda" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        meeting["backend"] = "cuda:nccl,cpu:gloo"  # what is on the CPU does not travel through the memory of a GPU
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True), InitProcessGroupKwargs(**meeting)]
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state()  # it holds the precision of the first call
    try:
        # `optim.compile` compiles, by the launcher's word too: Accelerate would once more
        accelerator = Accelerator(mixed_precision=precision, dynamo_backend="no", kwargs_handlers=handlers, **kwargs)
        if dist.is_initialized():
            all_reduce(torch.zeros(1, device=accelerator.device))  # the first message, still with the short timeout
            wait_at_most(PREPARE_MIN)
    except (dist.DistError, RuntimeError, ValueError) as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        raise BadInput(
            f"the {os.environ['WORLD_SIZE']} processes cannot start together ({_first_line(error)}). Either one of "
            f"them ended or did not come within {meet} s: look at its output. Or there are fewer GPUs than processes "
            f"({torch.accelerator.device_count()} here): start fewer, or set ACCELERATE_USE_CPU=true."
        ) from error
    return accelerator


def _refuse_absent_gpus() -> None:
    """Raise BadInput where Accelerate's launcher was told to use several GPUs and there is none, instead of training
    on the CPU without a word."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if launched and not cpu_is_requested() and not torch.accelerator.is_available():
        raise BadInput(
            "the launcher is set to use several GPUs (--multi_gpu, or its settings file), and there is no GPU here. "
            "Choose another `accelerate config`, or start processes on the CPU with ACCELERATE_USE_CPU=true torchrun "
            "--nproc_per_node 2 SCRIPT."
        )


def wait_at_most(minutes: float) -> None:
    """Set the timeout of collectives: a process that waits longer for another one fails. One process: do nothing."""
    if dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its name begins with an underline
            dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), dist.group.WORLD)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def set_threads(threads: int | None, device: torch.device) -> None:
    """Set the number of CPU threads that torch uses in this process.

    threads: the number; None: torch's default, but on a CPU, if `accelerate launch` set OMP_NUM_THREADS to 1 by itself,
    the cores divided among the processes of the machine.
    """
    if threads is None:
        launch = find_launch()
        alone = launch is not None and not launch.chose_threads and os.environ.get("OMP_NUM_THREADS") == "1"
        if device.type != "cpu" or not alone:
            return
        threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)


def prepare(
    accelerator: Accelerator, detector: torch.nn.Module, optimizer: Optimizer, tf32: bool | None, searches: bool
) -> tuple[torch.nn.Module, Optimizer]:
    """Set up the GPU and DDP for a `Detector` on its device, and return detector and optimizer prepared by Accelerate.

    Args:
        tf32: whether a GPU uses TensorFloat-32 in float32 products; None: PyTorch's default.
        searches: cuDNN searches for the fastest convolutions for each shape: all images have the same size.
    """
    if accelerator.device.type == "cuda":
        if tf32 is not None:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = searches
    accelerator.ddp_handler.broadcast_buffers = detector.buffers_steer_training
    # DDP puts its buckets in another order behind the first step, but not where it looks for unused parameters. Sums of
    # three and more numbers hang on that order, and on a CPU a resumed run equals the uninterrupted one to the bit.
    order_counts = accelerator.device.type == "cpu" and accelerator.num_processes > 2
    accelerator.ddp_handler.find_unused_parameters = detector.leaves_unused or order_counts
    with warnings.catch_warnings():  # Accelerate knows DDP's `broadcast_buffers` by no newer name
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        # Moved here: before it moves a detector, Accelerate imports what shards weights, which takes 0.4 s.
        detector = detector.to(accelerator.device)
        model, prepared = accelerator.prepare(detector, optimizer, device_placement=[False, None])
    # Accelerate's is for the scaler. It looks for packages in each step, a quarter of a millisecond.
    return model, optimizer if accelerator.scaler is None else prepared


def announce(world_size: int, folder: Path, messages: Iterable[str]) -> None:
    """Print the first lines of a run: processes, CPU threads, run folder and `messages`.

    Warns if the launcher was asked for several processes and has started one.
    """
    print(f"processes: {world_size}, CPU threads of each: {torch.get_num_threads()}", flush=True)
    print(f"run folder: {folder}", *messages, sep="\n", flush=True)
    if world_size == 1 and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        warnings.warn(  # `accelerate launch --cpu --num_processes 2` does this
            "the launcher was asked for several processes and started one. On CPU start them with "
            "`ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/...`.",
            stacklevel=2,
        )
