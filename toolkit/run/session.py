"""A run from start to end. Only this module and the `session_...` beside it read its settings.

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
    """The processes, folder and settings of a run, and the steps from them to a training and to its end.

    Attributes:
        config: with the seed of the checkpoint, where the run goes on from one. asked_seed: that of the command.
        staging: folder that a start writes to until nothing was refused; see `toolkit.run.folder.staging`.
        checkpoint: to go on from; None: a fresh start. stored: the settings it was trained with.
        measured: figures of the start, for environment.json.
        t: the training, once it is built. log: that of the training, once it has begun.
        test_table: data of `eval.test_split`, evaluated when the training has ended.
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
        """Whether batches arrive in page-locked memory."""
        return self.accelerator.device.type == "cuda"

    def say(self, text: str) -> None:
        """Print on the main process."""
        self.accelerator.print(text, flush=True)

    def stop_if_asked(self, when: str) -> None:
        """End the run between two long parts if a signal came on any process; a collective. Raises Preempted."""
        number = agree_max(self.signals.received)
        if number:
            raise Preempted(f"{signal_name(number)} {when}; `--run.resume latest` goes on")

    def open_data(self) -> tuple[DetectionTable, DetectionTable]:
        """Open and check training and validation data; what was wrong with them is listed in the run folder.

        Where a checkpoint is only evaluated, and the training data are a single set that the validation data are
        not a part of, the training data are not opened: the validation data stand for them.
        """
        table, val_table = open_tables(self)
        self.stop_if_asked("while the data was read")
        return table, val_table

    def make_detector(self, table: DetectionTable, start: Callable | None = None) -> Detector:
        """Return the detector with the weights it begins with, on the device; the same ones on every rank.

        start: what builds it out of the training data, as `start_scene_graph`; None: it needs nothing but the classes.
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
        """Build everything that the loop needs, and begin: at step 0, or where the checkpoint was written.

        Takes up the checkpoint, writes down settings and environment, and evaluates where that is due.

        evaluator: what measures predictions on `val_table`, such as `CocoEvaluator`.
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
        """Make the last evaluation, write the best weights to `final/` and the report, and push all of it to the hub
        where that is asked for; of an evaluation alone write the report only.

        Raises:
            Preempted: a signal came; a resumed run does what is left. BadInput: something cannot be written.
        """
        end(self, t)
