"""The start of a run: its processes, folder, signals and status, before there are data and a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit import index
from toolkit.base.distributed import leave, run_on_main, state_from_main
from toolkit.base.errors import BadInput, Preempted, StoppedByGuard, as_sentences
from toolkit.base.memory import naming_the_batch
from toolkit.base.signals import StopSignals
from toolkit.data.batches import naming_killed_workers
from toolkit.models import options_class
from toolkit.run.checkpoint import resolve_resume
from toolkit.run.folder import prepare_run_folder, staging
from toolkit.run.loop import batches_under_way
from toolkit.run.open_run import settings_beside
from toolkit.run.processes import announce, set_threads, start_accelerator
from toolkit.run.session import Session
from toolkit.run.status import FolderLock, run_status
from toolkit.run.watchdog import watchdog
from toolkit.run.writer import agent_run_id, tracker_names
from toolkit.step.execution import be_deterministic


@contextmanager
def session(config: Any) -> Iterator[Session]:
    """Set up processes, run folder, signals and status of a run, and yield its `Session`, for a `with` block.

    Raises:
        BadInput: the settings cannot be used here, the run folder cannot be used, or no valid checkpoint exists to
            resume from.
    """
    trial = agent_run_id()
    if trial:  # all trials of a sweep are started by one command
        config = replace(config, run=replace(config.run, name=f"{config.run.name}-{trial}"))
    run = config.run
    hub = config.hub
    tracker_names(run.tracker)
    accelerator = start_accelerator(run.precision)
    seed = run.seed
    is_main = accelerator.is_main_process
    if hub.push is not None and not run.eval_only:
        run_on_main(lambda: index.tool("check_push")(hub.push))
    with FolderLock() as lock:
        folder = run_on_main(lambda: prepare_run_folder(run.output_dir, run.name, run.resume, lock))
        with (
            StopSignals() as signals,
            run_status(folder, is_main) as status,
            watchdog(status.write),
            as_sentences(),
            naming_killed_workers(),
        ):
            set_threads(run.threads, accelerator.device)
            checkpoint, messages = state_from_main(lambda: resolve_resume(run.resume, folder, of_run=True))
            stored = run_on_main(lambda: checkpoint and settings_beside(checkpoint.path, config, options_class)) or {}
            if checkpoint is not None:  # data, augmentation and dropout go on as they began
                with checkpoint.reading("sampler") as sampler:
                    config = replace(config, run=replace(run, seed=sampler["seed"]))
            if is_main:
                announce(accelerator.num_processes, folder, [*messages, *([lock.note] if lock.note else [])])
            if run.deterministic:
                be_deterministic()
            with staging(folder, run_on_main(lambda: status.begun), is_main) as staged:
                s = Session(config, accelerator, folder, signals, status, checkpoint, stored, seed, lock, staged)
                try:
                    with naming_the_batch(lambda: () if s.t is None else batches_under_way(s.t)):
                        yield s
                except (Preempted, StoppedByGuard, BadInput) as error:
                    if s.log is not None:
                        state = "preempted" if isinstance(error, Preempted) else "failed"
                        s.log.attempt("ending the rows", partial(s.log.close, state))
                    raise
    leave()


