"""A run from start to end, in stages. In this package, only this module and the modules `session_...` read settings.

    with session(config) as s:               # processes, run folder, and the checkpoint to resume from
        table, val_table = s.open_data()     # data
        detector = s.make_detector(table)    # detector
        evaluator = CocoEvaluator(val_table, config.eval.backend)
        t = s.training(detector, table, val_table, evaluator)
        while not t.finished:
            train_one_epoch(t)               # the script's loop
        s.end(t)                             # best weights, final/, report: `session_end`

`training` builds the optimizer, the plan and all else (`session_build`), and then restores the state of a run that
resumes (`session_begin`). A script can replace each of these calls by its own. Until the last check of `training` has
passed, nothing is written to the run folder proper, see `toolkit.run.folder.staging`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit import index
from toolkit.base.distributed import agree_max, leave, run_on_main, state_from_main
from toolkit.base.errors import BadInput, Preempted, StoppedByGuard, as_sentences
from toolkit.base.memory import naming_the_batch
from toolkit.base.seeding import seed_step
from toolkit.base.signals import StopSignals, signal_name
from toolkit.data import pipeline
from toolkit.data.batches import naming_killed_workers
from toolkit.data.formats import is_several
from toolkit.data.same_on_ranks import check_same_on_ranks
from toolkit.data.splits import READING, check_not_empty, open_all_splits, open_split, share_of
from toolkit.data.table import DetectionTable
from toolkit.evaluation.coco import check_ground_truth
from toolkit.models import options_class
from toolkit.models.detector import Detector
from toolkit.models.start import check_losses, check_weights, start_detector
from toolkit.run.checkpoint import Checkpoint, resolve_resume
from toolkit.run.folder import prepare_run_folder, staging
from toolkit.run.launcher import ResolvedExecution
from toolkit.run.loop import batches_under_way
from toolkit.run.open_run import settings_beside
from toolkit.run.processes import announce, set_threads, start_accelerator, wait_at_most
from toolkit.run.session_begin import begin
from toolkit.run.session_build import build_training, learns_masks, settle_execution, weigh_classes
from toolkit.run.session_end import end
from toolkit.run.settings_file import CONFIG_FILE
from toolkit.run.status import FolderLock, RunStatus, run_status
from toolkit.run.training import Training
from toolkit.run.watchdog import watchdog
from toolkit.run.writer import agent_run_id, tracker_names
from toolkit.step.execution import be_deterministic, cpu_computes_in_bf16, describe_float32_layers


@contextmanager
def session(config: Any) -> Iterator["Session"]:
    """Set up processes, run folder, signals and status of a run, and yield its `Session`, for a `with` block.

    Raises:
        BadInput: the settings cannot be used here, the run folder cannot be used, or no valid checkpoint exists to
            resume from.
    """
    config = _named_after_trial(config)
    run = config.run
    hub = config.hub
    tracker_names(run.tracker)
    accelerator = start_accelerator(run.precision)
    is_main = accelerator.is_main_process
    if hub.push is not None and not run.eval_only:
        run_on_main(lambda: index.tool("check_push")(hub.push))

    # An error passes these contexts from the last one to the first. What each of them makes of it, the next one gets.
    with ExitStack() as contexts:
        # Left last: another run may use the folder only after the status of this one is written.
        lock = contexts.enter_context(FolderLock())
        folder = run_on_main(lambda: prepare_run_folder(run.output_dir, run.name, run.resume, lock))
        # Before all that takes long: a signal is noted, and the stages ask for it by `stop_if_asked`.
        signals = contexts.enter_context(StopSignals())
        # Outside of the watchdog, so that it records the first failure, which may be another process's.
        status = contexts.enter_context(run_status(folder, is_main))
        # Outside of what words errors, so that the other processes get the same sentence and exit code.
        contexts.enter_context(watchdog(status.write))
        # Failures of disk and memory, and of workers, become BadInput with what to do.
        contexts.enter_context(as_sentences())
        contexts.enter_context(naming_killed_workers())

        set_threads(run.threads, accelerator.device)
        if run.deterministic:
            be_deterministic()
        checkpoint, messages = state_from_main(lambda: resolve_resume(run.resume, folder, of_run=True))
        stored, began = run_on_main(lambda: _settings_so_far(config, folder, checkpoint))
        if lock.note:
            messages.append(lock.note)
        if is_main:
            announce(accelerator.num_processes, folder, messages)
        # Inside of all others: what a refused start has written is deleted before its error is recorded.
        staged = contexts.enter_context(staging(folder, run_on_main(lambda: status.begun), is_main))
        s = Session(
            config=_with_seed_of(checkpoint, config),
            accelerator=accelerator,
            folder=folder,
            signals=signals,
            status=status,
            lock=lock,
            staging=staged,
            checkpoint=checkpoint,
            stored=stored,
            began=began,
            asked_seed=run.seed,
        )
        contexts.enter_context(_closing_rows(s))
        # Innermost: only here is it known which batch ran out of memory.
        contexts.enter_context(naming_the_batch(lambda: () if s.t is None else batches_under_way(s.t)))
        yield s
    leave()


def _named_after_trial(config: Any) -> Any:
    """Return settings whose run name ends with the id of the trial, since one command starts all trials of a sweep."""
    trial = agent_run_id()
    if not trial:
        return config
    return replace(config, run=replace(config.run, name=f"{config.run.name}-{trial}"))


def _with_seed_of(checkpoint: Checkpoint | None, config: Any) -> Any:
    """Return settings with the seed of the checkpoint, so that data, augmentation and dropout go on as they began."""
    if checkpoint is None:
        return config
    with checkpoint.reading("sampler") as sampler:
        return replace(config, run=replace(config.run, seed=sampler["seed"]))


def _settings_so_far(config: Any, folder: Path, checkpoint: Checkpoint | None) -> tuple[dict, dict]:
    """Return the settings that a checkpoint was trained with, and those that the run in `folder` began with.

    The second are the first, but for a run that was killed before it saved. They are empty for a run that is new.
    """
    stored = {} if checkpoint is None else settings_beside(checkpoint.path, config, options_class)
    if not stored and (folder / CONFIG_FILE).is_file():
        return stored, settings_beside(folder, config, options_class)
    return stored, stored


@contextmanager
def _closing_rows(s: "Session") -> Iterator[None]:
    """Close rows and trackers where a run ends on purpose, so that the trackers learn how it ended."""
    try:
        yield
    except (Preempted, StoppedByGuard, BadInput) as error:
        if s.t is not None and s.t.log.writer is not None:
            state = "preempted" if isinstance(error, Preempted) else "failed"
            s.t.log.attempt("ending the rows", partial(s.t.log.close, state))
        raise


@dataclass
class Session:
    """The processes, folder and settings of a run; its methods open the data, build the training, and end the run.

    Attributes:
        config: the settings; if the run resumes from a checkpoint, with the seed of that checkpoint.
        status: keeps `status.json` of the run.
        staging: the folder to write to until all checks at the start have passed, see `toolkit.run.folder.staging`.
        checkpoint: the checkpoint to resume from; None: a fresh start.
        stored: the settings that the checkpoint was trained with; empty for a fresh start.
        began: the settings that the run began with: `stored`, or those of a start that was killed before it saved.
        asked_seed: the seed in the settings of this command.
        facts: what the stages have found out, for environment.json.
        test_table: the data of `eval.test_split`, which are evaluated after training; None: there are none.
        t: the training, once it is built.
    """

    config: Any
    accelerator: Accelerator
    folder: Path
    signals: StopSignals
    status: RunStatus
    lock: FolderLock
    staging: Path
    checkpoint: Checkpoint | None
    stored: dict
    began: dict
    asked_seed: int
    facts: dict = field(default_factory=dict)
    test_table: DetectionTable | None = None
    t: Training | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the main process."""
        return self.accelerator.is_main_process

    def say(self, text: str) -> None:
        """Print a text on the main process; other processes print nothing."""
        self.accelerator.print(text, flush=True)

    def stop_if_asked(self, when: str) -> None:
        """Raise Preempted if any process received a stop signal; a collective.

        when: the end of the message, such as "while the data was read".
        """
        number = agree_max(self.signals.received)
        if number:
            raise Preempted(f"{signal_name(number)} {when}; `--run.resume latest` goes on")

    # ---- data --------------------------------------------------------------------------------------------------------

    def open_data(self) -> tuple[DetectionTable, DetectionTable]:
        """Open and check the data, and return the tables of training and validation data.

        Faults in the data are listed in the run folder.

        With `run.eval_only` and a checkpoint, the training data are not opened if they are a single data set and the
        validation data are not a share of them. The table of validation data is then returned twice.
        """
        c = self.config.data
        reading = {key: getattr(c, key) for key in READING}
        if learns_masks(self.config.model) or c.boxes_from_masks:
            pipeline.check_masks(c, "model.masks" if learns_masks(self.config.model) else "data.boxes_from_masks")
            reading["masks"] = True
        apart = not share_of(c.val) and c.overfit_batches is None and not is_several(c.path, c.train)
        if self.config.run.eval_only and self.checkpoint is not None and apart:
            listing = self.staging / "data_problems_val.txt"
            table = val_table = open_split(c.val, say=self.say, listing=listing, **reading)
        else:
            table, val_table, self.test_table = self._open_all_splits(reading)
        opened = {"training data": table, "validation data": val_table, "the test split": self.test_table}
        check_same_on_ranks({name: one for name, one in opened.items() if one is not None})
        for note in check_ground_truth(val_table):
            self.say(note)
        self.stop_if_asked("while the data was read")
        return table, val_table

    def _open_all_splits(self, reading: dict) -> tuple[DetectionTable, DetectionTable, DetectionTable | None]:
        c = self.config.data
        test = None if self.config.run.eval_only else self.config.eval.test_split
        checks = [] if self.checkpoint else [partial(check_weights, self.config.model)]  # a checkpoint has the weights
        images_of_a_batch = c.batch_size_per_device * self.accelerator.num_processes
        tables = open_all_splits(
            c.train,
            c.val,
            test,
            self.staging,
            *checks,
            say=self.say,
            max_train_images=c.max_train_images,
            overfit_images=(c.overfit_batches or 0) * images_of_a_batch,
            **reading,
        )
        check_not_empty(tables[0], c.allow_mostly_empty)
        return tables

    # ---- detector ----------------------------------------------------------------------------------------------------

    def make_detector(self, table: DetectionTable, start: Callable | None = None) -> Detector:
        """Return the detector with its initial weights on the device; the weights are the same on every rank.

        Args:
            table: training data, which the classes come from.
            start: function that builds the detector from the training data, such as `start_scene_graph`; None:
                `start_detector`, which needs the classes only.
        """
        data = self.config.data
        options = self.config.model
        class_weights = self.config.loss.class_weights
        seed_step(self.config.run.seed, 0, 0)
        if start is not None:
            detector = start(options, table, self.staging, checkpoint=self.checkpoint, say=self.say)
        else:
            resumed_from = self.checkpoint and self.checkpoint.path
            names = table.class_names
            detector = start_detector(options, names, self.staging, resumed_from=resumed_from, say=self.say)
        # As images are, else a GPU turns the weights with each step. On a CPU it is a tenth of a step in bfloat16.
        detector = detector.to(self.accelerator.device, memory_format=torch.channels_last)
        if detector.fixed_size:
            pipeline.check_one_size(detector.stride, [data.image_size, *data.multi_scale], data.scales)
        check_losses(
            detector,
            mixup=data.mixup,
            partly_labelled=table.labelled_classes is not None,
            weighs_classes=class_weights is not None,
        )
        if class_weights is not None:
            self.facts["class_weights"] = weigh_classes(detector, table, class_weights, self.say)
        self._check_export(detector, table)
        self.stop_if_asked("while the detector was built")
        return detector

    def _check_export(self, detector: Detector, table: DetectionTable) -> None:
        """Raise BadInput if the run is to export the detector at its end, and it cannot be exported."""
        run = self.config.run
        data = self.config.data
        if not run.export or run.eval_only:
            return
        index.tool("check_export")(detector)
        if run.export_check:
            self.say("run.export: exporting the detector as it is now, to see that it can be")
            size = pipeline.processor_size(data.image_size, data.scales, data.max_size)
            try_export = partial(index.tool("try_export"), detector, table.categories, size)
            run_on_main(lambda: try_export(self.config.eval.max_detections))

    # ---- optimizer and plan, state of a resume -----------------------------------------------------------------------

    def training(
        self, detector: Detector, table: DetectionTable, val_table: DetectionTable, evaluator: Any
    ) -> Training:
        """Build the training, begin the run at step 0 or at the step of the checkpoint, and return the training.

        This restores the checkpoint, writes settings and environment to the run folder, and evaluates if an evaluation
        is due before the first step.

        evaluator: computes the metrics of predictions on `val_table`, such as `CocoEvaluator`.
        """
        execution = self._settle_execution(detector)
        self.t = build_training(self, execution, detector, table, val_table, evaluator)
        begin(self, self.t, execution, table)
        wait_at_most(self.config.run.hang_minutes)
        return self.t

    def _settle_execution(self, detector: Detector) -> ResolvedExecution:
        """Choose precision and compilation, which depend on the detector, and print them with their origin."""
        device = self.accelerator.device
        execution = settle_execution(self.config, self.began, detector, device)
        if execution.precision != self.accelerator.mixed_precision:
            self.accelerator = start_accelerator(execution.precision)
            execution = replace(execution, precision=self.accelerator.mixed_precision)  # fp16 is not used on a CPU
        slow = execution.precision == "bf16" and device.type == "cpu" and not cpu_computes_in_bf16()
        advice = ", for which this CPU has no instructions: --run.precision no is faster" if slow else ""
        self.say(f"{execution}{advice}")
        note = describe_float32_layers(detector, device.type, execution.precision)
        if note:
            self.say(note)
        return execution

    # ---- end ---------------------------------------------------------------------------------------------------------

    def end(self, t: Training) -> None:
        """Make the last evaluation, write the best weights to `final/`, evaluate the test split, write the report, and
        upload `final/` to the hub if `hub.push` is set.

        With `run.eval_only` only the report is written.

        Raises:
            Preempted: a signal was received; a resumed run does the rest.
            BadInput: a file cannot be written.
        """
        end(self, t)
