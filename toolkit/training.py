"""What one training run is made of, and the parts of it that are no training loop: saving, resuming, recovering.

The loop itself stands in each script. Nothing here reads settings; the scripts hand in what they built.
"""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from toolkit.batch import Batch
from toolkit.data.batches import windows
from toolkit.data.sampling import EpochSampler
from toolkit.data.table import DetectionTable
from toolkit.distributed import run_on_main, seed_step
from toolkit.errors import BadInput, StoppedByGuard
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.scene_graph_evaluator import SceneGraphEvaluator
from toolkit.runs.checkpoint import Checkpoint, bring_best, newest_valid, save_checkpoint
from toolkit.runs.console import console_line, progress
from toolkit.runs.writer import RunWriter
from toolkit.signals import StopSignals
from toolkit.step.compiling import GraphCount
from toolkit.step.ema import Ema
from toolkit.step.gradients import drop_gradients
from toolkit.step.guard import Action, NanGuard
from toolkit.step.length import StepBudget, is_time
from toolkit.step.losses import LossWeights, WeightedLosses
from toolkit.step.meters import Meters, MomentumMeter
from toolkit.step.nan_report import investigate, rerun_window
from toolkit.step.plateau import PlateauSchedule
from toolkit.step.schedules import Schedule
from toolkit.step.timer import StepTimer


@dataclass
class Training:
    """The objects of one run. `model` is what Accelerate prepared, `detector` the same weights without wrappers."""

    accelerator: Accelerator
    model: nn.Module
    detector: nn.Module
    weights: LossWeights
    optimizer: torch.optim.Optimizer
    schedule: Schedule | PlateauSchedule
    guard: NanGuard
    sampler: EpochSampler
    loader: torch.utils.data.DataLoader
    val_table: DetectionTable | None
    val_loader: torch.utils.data.DataLoader | None
    evaluator: CocoEvaluator | SceneGraphEvaluator | None
    signals: StopSignals
    folder: Path
    seed: int
    total_steps: int
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2
    metric_for_best: str = "bbox_AP"
    patience: int | None = None
    score_threshold: float = 0.0
    pictures: int = 8
    ema: Ema | None = None
    budget: StepBudget | None = None
    meters: Meters = field(default_factory=Meters)
    timer: StepTimer = field(default_factory=StepTimer)
    step: int = 0
    best: float | None = None
    best_step: int = -1
    evaluations_without_better: int = 0
    evaluated_step: int = -1
    saved_step: int = -1
    elapsed_s: float = 0.0
    last_row: dict[str, float | None] = field(default_factory=dict)
    writer: RunWriter | None = None
    graphs: GraphCount = field(default_factory=GraphCount)

    def __post_init__(self):
        self._began, self._bar = time.monotonic(), None

    @property
    def finished(self) -> bool:
        """Whether the step budget is used up, or early stopping or the schedule has spoken."""
        patience_over = self.patience is not None and self.evaluations_without_better >= self.patience
        return self.step >= self.total_steps or patience_over or self.schedule.finished

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Every parameter that the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def loss_names(self) -> list[str]:
        """Names that losses have in a row: the total, and every loss weighted and unscaled."""
        return ["loss", *(f"{name}{suffix}" for name in self.detector.loss_names for suffix in ("", "_unscaled"))]

    def names(self) -> list[str]:
        """What every rank hands to the one collective of a step, whatever its batch produced."""
        metrics = [f"{name}/{part}" for name in self.detector.metric_names for part in ("sum", "count")]
        return [*self.loss_names, *metrics, "grad_norm", "buffers_finite", "signal", "time_s"]

    def windows(self, accumulation_steps: int) -> Iterator[list[Batch]]:
        """The accumulation windows of what is left of the epoch; the waiting is timed, evaluating and saving not."""
        self.timer.start()
        for window in windows(self.loader, accumulation_steps):
            self.timer.data_ready()
            yield window
            self.timer.start()

    def images_in(self, window: Sequence[Batch]) -> int:
        """Images of a window over all ranks, as good as: the others' last batch may have one image less or more."""
        return sum(len(batch.targets) for batch in window) * self.accelerator.num_processes

    def seed_micro_batch(self, micro: int) -> None:
        """Dropout and denoising noise become functions of (seed, step, rank, micro-batch): nothing to save."""
        seed_step(self.seed, self.step, self.accelerator.process_index, micro)

    def without_sync(self, more_to_come: bool):
        """Gradients are averaged over ranks once per window, at its last micro-batch."""
        return self.accelerator.no_sync(self.model) if more_to_come else nullcontext()

    def note_step(self, reduced: Mapping[str, float], images: int) -> None:
        """After an update: meters, the row of metrics when it is time, the progress bar, the budget of minutes."""
        self.timer.step_done(images)
        row = training_row(self, reduced)
        self.meters.update({name.removeprefix("train/"): value for name, value in row.items() if "/lr/" not in name})
        self._bar.update(self.step - self._bar.n)
        self.status["step"] = self.step
        left = self.total_steps - self.step
        if is_time(self.step, self.log_every, last=self.total_steps):
            means = {f"train/mean/{k}": m.mean for k, m in self.meters.items() if isinstance(m, MomentumMeter)}
            self.log({**row, **means, **self.timer.row(left)})
            if news := self.graphs.news(self.step):
                self.say(news)
        if self.budget is not None and self.budget.total_steps is None:
            self.budget.add(reduced["time_s"])
            self.budget.fix(self.budget.propose())
            if self.budget.total_steps is not None:
                self.set_length(min(self.total_steps, self.budget.total_steps))

    def set_length(self, total_steps: int) -> None:
        """Fixes the number of steps that training and its schedule go by."""
        self.total_steps = self._bar.total = total_steps
        self.schedule.set_total(total_steps)
        self.say(f"training takes {total_steps} steps")

    def start(self, writer: RunWriter, status: dict) -> None:
        """Takes the writer, once a checkpoint was loaded or not, and shows the progress bar.

        status: gets `step` at every step, for status.json.
        """
        self.writer, self.status = writer, status
        self._bar = progress(self.total_steps, self.step, self.accelerator.is_main_process)
        if self.evaluator is not None:
            self.check_metric()
        if self.guard.policy == "rollback" and self.saved_step != self.step:
            self.save()  # something to roll back to

    def log(self, values: Mapping[str, float | None]) -> None:
        """A row of metrics.jsonl and of the tracker; a training row is printed too where there is no bar."""
        elapsed_s = round(self.elapsed_s + time.monotonic() - self._began, 3)
        row = {"step": self.step, "epoch": self.sampler.epoch, "time_s": elapsed_s, **values}
        self.writer.log(row)
        if "train/loss" in row:
            self.say(console_line(row, self.total_steps))

    def say(self, text: str) -> None:
        """Prints on the main process, above the progress bar where there is one."""
        if self.accelerator.is_main_process:
            self._bar.write(text, file=sys.stdout) if self._bar is not None else print(text, flush=True)

    def close(self) -> None:
        """Ends the bar, the rows and the tracker."""
        if self._bar is not None:
            self._bar.close()
        if self.writer is not None:
            self.writer.close()

    def note_metric(self, row: Mapping[str, float]) -> bool:
        """Takes the metric for best from an evaluation row; True if it is the best so far.

        Raises:
            BadInput: the row has no such metric; the message lists those it has.
        """
        self.evaluated_step, self.last_row = self.step, dict(row)
        key = f"val/{self.metric_for_best}"
        if key not in row:
            self.refuse_metric(name.removeprefix("val/") for name in row if name.startswith("val/"))
        value = row[key]
        sign = -1 if is_minimised(self.metric_for_best) else 1
        defined = value is not None and not math.isnan(value)
        better = defined and (self.best is None or sign * value > sign * self.best)
        if better:
            self.best, self.best_step = value, self.step
        self.evaluations_without_better = 0 if better else self.evaluations_without_better + 1
        if self.step > 0 and self.schedule.observe(None if value is None else sign * value):
            self.schedule.set(self.step)
            self.say(f"learning rates fall to {self.schedule.rates()}: {key} has stopped improving")
        return better

    def check_metric(self) -> None:
        """Raises BadInput before step 0 when no evaluation can have the metric for best; a collective."""
        empty = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
        nothing = dict.fromkeys(self.evaluator.image_ids, empty)
        known = [*run_on_main(lambda: list(self.evaluator.evaluate(nothing))), *self.loss_names]
        known += self.detector.metric_names
        if self.ema is not None:
            known += [f"ema/{name}" for name in known]
        if self.metric_for_best not in known:
            self.refuse_metric(known)

    def refuse_metric(self, known: Iterable[str]) -> None:
        """Raises BadInput: the metric for best is none of `known`."""
        without_ema = " ema/... needs --optim.ema_decay above 0." if self.ema is None else ""
        raise BadInput(
            f"--eval.metric_for_best {self.metric_for_best}: no such metric; there are {', '.join(sorted(known))}."
            + without_ema
        )

    def save(self, best: bool = False) -> None:
        """Writes `checkpoints/step_000123/` on the main process; every rank raises if that fails."""
        tensors = {"model": self.detector.state_dict()}
        if self.ema is not None:
            tensors["ema"] = self.ema.module.state_dict()
        if any(True for _ in self.weights.parameters()):
            tensors["loss_weights"] = self.weights.state_dict()
        scaler = self.accelerator.scaler
        state = {
            "step": self.step,
            "categories": [asdict(category) for category in self.val_table.categories],
            "predicates": list(self.val_table.predicates),
            "attributes": list(self.val_table.attributes),
            "sampler": self.sampler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "total_steps": self.total_steps,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "guard": self.guard.state_dict(),
            "meters": self.meters.state_dict(),
            "budget": self.budget.state_dict() if self.budget is not None else None,
            "best": self.best,
            "best_step": self.best_step,
            "evaluations_without_better": self.evaluations_without_better,
            "evaluated_step": self.evaluated_step,
            "metric_for_best": self.metric_for_best,
            "elapsed_s": self.elapsed_s + time.monotonic() - self._began,
            "writer": self.writer.state_dict(),
        }
        self.saved_step = self.step
        run_on_main(
            lambda: save_checkpoint(
                self.folder / "checkpoints",
                self.step,
                tensors=tensors,
                optimizer=self.optimizer.state_dict(),
                state=state,
                keep=self.keep,
                best=best,
            )
        )

    def load(self, checkpoint: Checkpoint, keep_schedule: bool = True, eval_only: bool = False) -> list[str]:
        """Takes up everything a checkpoint holds; returns in words what will not be identical.

        Args:
            checkpoint: verified by its manifest.
            keep_schedule: False: keep this command's learning-rate schedule and length.
            eval_only: nothing will be trained, so the run folder's checkpoints and links stay as they are.

        Raises:
            BadInput: the checkpoint is of other classes or another model.
        """
        rates = [(group["initial_lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        state, folder = checkpoint.state, self.folder / "checkpoints"
        names = [category["name"] for category in state["categories"]]
        if names != self.val_table.class_names:
            raise BadInput(f"{checkpoint.path} is of the classes {names}, the data has {self.val_table.class_names}")
        try:
            self.load_weights(checkpoint)
        except (RuntimeError, ValueError) as error:  # tensors, or groups of the optimizer, that there are not
            raise BadInput(f"{checkpoint.path} is of another model, or of other optimizer groups: resume with the "
                           f"settings of the run that wrote it ({error})") from error  # fmt: skip
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        if eval_only or run_on_main(lambda: checkpoint.path.resolve().parent == folder.resolve()):
            self.saved_step = self.step
        notes = self.sampler.load_state_dict(state["sampler"])
        if keep_schedule:
            self.schedule.load_state_dict(state["schedule"])
            self.total_steps = state["total_steps"]
            if state["budget"] is None:
                self.budget = None  # the saved length is no matter of minutes
            elif self.budget is not None:
                self.budget.load_state_dict(state["budget"])
        else:
            for group, (initial_lr, weight_decay) in zip(self.optimizer.param_groups, rates, strict=True):
                group.update(initial_lr=initial_lr, weight_decay=weight_decay)
        self.schedule.set(self.step)
        self.guard.load_state_dict(state["guard"])
        self.meters.load_state_dict(state["meters"])
        if state["metric_for_best"] != self.metric_for_best:
            notes.append(f"best metric starts anew: it was {state['metric_for_best']}, now {self.metric_for_best}")
            return notes
        self.evaluated_step = state["evaluated_step"]
        self.evaluations_without_better = state["evaluations_without_better"]
        best, step = state["best"], state["best_step"]
        if best is None or eval_only or run_on_main(lambda: bring_best(checkpoint.path, step, folder)):
            self.best, self.best_step = best, step
        else:
            notes.append(f"best metric starts anew: the checkpoint of step {step}, which had it, is not there any more")
        return notes

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Weights, their moving average, optimizer and scaler state of a checkpoint; nothing else."""
        self.detector.load_state_dict(checkpoint.tensors["model"])
        if "loss_weights" in checkpoint.tensors:
            self.weights.load_state_dict(checkpoint.tensors["loss_weights"])
        if self.ema is not None and "ema" in checkpoint.tensors:
            self.ema.module.load_state_dict(checkpoint.tensors["ema"])
            self.ema.load_state_dict(checkpoint.state["ema"])
        elif self.ema is not None:
            self.ema.module.load_state_dict(checkpoint.tensors["model"])
        self.optimizer.load_state_dict(checkpoint.optimizer)
        if self.accelerator.scaler is not None and checkpoint.state["scaler"]:
            self.accelerator.scaler.load_state_dict(checkpoint.state["scaler"])

    def decide(self, reduced: Mapping[str, float]) -> Action:
        """The guard's answer to a window, from values that are equal on every rank."""
        scaler = self.accelerator.scaler
        losses = {name: reduced[name] for name in ("loss", *self.detector.loss_names)}
        scale = scaler.get_scale() if scaler is not None else None
        return self.guard.decide(self.step, losses, reduced["grad_norm"], scale, reduced["buffers_finite"])

    def recover(
        self, action: Action, window: Sequence[Batch], denominators: Sequence[Mapping], reduced: Mapping[str, float]
    ) -> None:
        """What follows a window that the guard refused, every rank alike: report, undo the forward, then as decided.

        Raises:
            StoppedByGuard: the policy says so; weights and state are those before the window, and saved.
        """
        if action is Action.CALIBRATE:  # the fp16 scaler looks for its scale: it skips this update by itself
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        message = self._report_nan(action, window, denominators, reduced)
        drop_gradients(self.weights)
        if (scaler := self.accelerator.scaler) is not None:
            scaler.update(scaler.get_scale())  # as it is: forgets that it has unscaled, which it does once per update
        if action is Action.STOP:
            self.save()
            raise StoppedByGuard(f"{message}\nThe weights before that step are saved.")
        if action is Action.ROLLBACK:
            # The data goes on after the window that broke: run again from the same weights it would break again.
            checkpoint, passed_over = run_on_main(lambda: newest_valid(self.folder / "checkpoints"))
            if checkpoint is None:
                raise StoppedByGuard(f"{message}\nThere is no checkpoint to roll back to. {' '.join(passed_over)}")
            self.load_weights(checkpoint)
            self.step = self.saved_step = checkpoint.step
            self.schedule.scale = self.guard.lr_scale
            self.schedule.set(self.step)
        self.say(f"guard: {message}\n{action.value}: goes on from step {self.step} with the next data.")

    def _report_nan(self, action, window, denominators, reduced) -> str:
        scaler, rank = self.accelerator.scaler, self.accelerator.process_index
        precision = self.accelerator.mixed_precision
        scale = scaler.get_scale() if scaler is not None else 1.0
        where = {"step": self.step, "seed": self.seed, "rank": rank, "precision": precision, "scale": scale}
        facts = {
            "epoch": self.sampler.epoch,
            "losses": {name: reduced[name] for name in ("loss", *self.detector.loss_names)},
            "grad_norm": reduced["grad_norm"],
            "lr": self.schedule.rates(),
            "denominators": denominators,
            "loss_weights": self.weights.values(self.step),
            "action": action.value,
            "categories": [asdict(category) for category in self.val_table.categories],
        }

        def run_again() -> list[dict]:
            return rerun_window(self.detector, self.weights, window, denominators, **where)

        return investigate(self.guard, self.detector, run_again, self.folder, window, where | facts)


def is_minimised(metric: str) -> bool:
    """Whether less of a metric of evaluation is better: losses and errors."""
    name = metric.rpartition("ema/")[2]
    return name.startswith("loss") or "_error" in name


def add_up(sums: dict[str, Tensor], weighted: WeightedLosses, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Adds one micro-batch to the window's sums, which go into the collective under `Training.names`."""
    entries = {"loss": weighted.total, **weighted.weighted}
    entries |= {f"{name}_unscaled": value for name, value in weighted.unweighted.items()}
    for name, (total, count) in metrics.items():
        entries |= {f"{name}/sum": total, f"{name}/count": count}
    for name, value in entries.items():
        value = value.detach() if isinstance(value, Tensor) else value
        sums[name] = sums[name] + value if name in sums else value


def training_row(t: Training, reduced: Mapping[str, float]) -> dict[str, float]:
    """One step as a row of metrics.jsonl: weighted and unscaled losses, metrics that had something to count, rates."""
    row = {"train/loss": reduced["loss"]}
    for name in t.detector.loss_names:
        row |= {f"train/{name}": reduced[name], f"train/{name}_unscaled": reduced[f"{name}_unscaled"]}
    for name in t.detector.metric_names:
        if reduced[f"{name}/count"] > 0:
            row[f"train/{name}"] = reduced[f"{name}/sum"] / reduced[f"{name}/count"]
    row |= {f"train/lr/{group['name']}": group["lr"] for group in t.optimizer.param_groups}
    row["train/grad_norm"] = reduced["grad_norm"]
    return row
