"""A run from start to end. In this package, only this module and the modules `session_...` read the run's settings.

    with session(config) as s:    # of `toolkit.run.session_start`
        table, val_table = s.open_data()
        detector = s.make_detector(table)
        t = s.training(detector, table, val_table, CocoEvaluator(val_table, config.eval.backend))
        while not t.finished:
            train_one_epoch(t)
        s.end(t)    # a script can replace each of these calls by its own
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit import index
from toolkit.base.distributed import agree_max
from toolkit.base.errors import Preempted
from toolkit.base.seeding import seed_step
from toolkit.base.signals import StopSignals, signal_name
from toolkit.data import pipeline
from toolkit.data.table import DetectionTable
from toolkit.models.detector import Detector
from toolkit.models.start import check_losses, start_detector
from toolkit.run.checkpoint import Checkpoint
from toolkit.run.log import Log
from toolkit.run.processes import wait_at_most
from toolkit.run.session_begin import begin
from toolkit.run.session_end import end
from toolkit.run.session_objects import build_training, open_tables, weigh_classes
from toolkit.run.status import FolderLock, RunStatus
from toolkit.run.training import Training
from toolkit.run.validation import warn_of_crowds


@dataclass
class Session:
    """The processes, folder and settings of a run; its methods open the data, build the training, and end the run.

    Attributes:
        config: the settings; if the run resumes from a checkpoint, with the seed of that checkpoint.
        status: keeps `status.json` of the run.
        checkpoint: the checkpoint to resume from; None: a fresh start.
        stored: the settings that the checkpoint was trained with; empty for a fresh start.
        asked_seed: the seed in the settings of this command.
        staging: the folder to write to until all checks at the start have passed, see `toolkit.run.folder.staging`.
        measured: facts found at the start, which are written to environment.json.
        log: the log of the training, once the training has begun.
        t: the training, once it is built.
        test_table: the data of `eval.test_split`, which are evaluated after training; None: there are none.
    """

    config: Any
    accelerator: Accelerator
    folder: Path
    signals: StopSignals
    status: RunStatus
    checkpoint: Checkpoint | None
    stored: dict
    asked_seed: int
    lock: FolderLock
    staging: Path
    measured: dict = field(default_factory=dict)
    log: Log | None = None
    t: Training | None = None
    test_table: DetectionTable | None = None

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def pins(self) -> bool:
        """Whether batches are loaded into page-locked (pinned) memory."""
        return self.accelerator.device.type == "cuda"

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

    def open_data(self) -> tuple[DetectionTable, DetectionTable]:
        """Open and check the data, and return the tables of training and validation data.

        Faults in the data are listed in the run folder.

        With `run.eval_only` and a checkpoint, the training data are not opened if they are a single data set and the
        validation data are not a share of them. The table of validation data is then returned twice.
        """
        table, val_table = open_tables(self)
        self.stop_if_asked("while the data was read")
        return table, val_table

    def make_detector(self, table: DetectionTable, start: Callable | None = None) -> Detector:
        """Return the detector with its initial weights on the device; the weights are the same on every rank.

        Args:
            table: training data, which the classes come from.
            start: function that builds the detector from the training data, such as `start_scene_graph`; None:
                `start_detector`, which needs the classes only.
        """
        data = self.config.data
        options = self.config.model
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
            weighs_classes=self.config.loss.class_weights is not None,
        )
        weigh_classes(self, detector, table)
        if self.config.run.export:
            index.tool("check_export")(detector)
        self.stop_if_asked("while the detector was built")
        return detector

    def training(
        self, detector: Detector, table: DetectionTable, val_table: DetectionTable, evaluator: Any
    ) -> Training:
        """Build the training, begin the run at step 0 or at the step of the checkpoint, and return the training.

        This restores the checkpoint, writes settings and environment to the run folder, and evaluates if an evaluation
        is due before the first step.

        evaluator: computes the metrics of predictions on `val_table`, such as `CocoEvaluator`.
        """
        t = build_training(self, detector, table, val_table, evaluator)
        self.t = t
        if not self.config.run.eval_only:
            for warning in t.plan.warnings_of_length():
                self.say(warning)
            warn_of_crowds(t)
        begin(self, t, table)
        wait_at_most(self.config.run.hang_minutes)
        return t

    def end(self, t: Training) -> None:
        """Make the last evaluation, write the best weights to `final/`, evaluate the test split, write the report, and
        upload `final/` to the hub if `hub.push` is set.

        With `run.eval_only` only the report is written.

        Raises:
            Preempted: a signal was received; a resumed run does what is left.
            BadInput: a file cannot be written.
        """
        end(self, t)
