"""What one training run is made of, and the parts of it that are no training loop: saving, resuming, recovering.

The loop itself stands in each script. Nothing here reads settings; the scripts hand in what they built.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from toolkit.checkpoint import Checkpoint, newest_valid, save_checkpoint
from toolkit.data.loaders import Batch
from toolkit.data.samplers import EpochSampler
from toolkit.distributed import broadcast_object, run_on_main, seed_step
from toolkit.ema import Ema
from toolkit.errors import BadInput, StoppedByGuard
from toolkit.guards import Action, NanGuard, diagnose, write_report
from toolkit.losses import LossWeights, WeightedLosses
from toolkit.meters import Meters, StepTimer
from toolkit.schedules import Schedule, StepBudget
from toolkit.signals import StopSignals
from toolkit.writers import RunWriter


@dataclass
class Training:
    """The objects of one run. `model` is what Accelerate prepared, `detector` the same weights without wrappers."""

    accelerator: Accelerator
    model: nn.Module
    detector: nn.Module
    weights: LossWeights
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    guard: NanGuard
    sampler: EpochSampler
    loader: torch.utils.data.DataLoader
    writer: RunWriter
    signals: StopSignals
    folder: Path
    seed: int
    total_steps: int
    categories: list[dict]
    ema: Ema | None = None
    budget: StepBudget | None = None
    keep: int = 2
    metric_for_best: str = "bbox_AP"
    patience: int | None = None
    meters: Meters = field(default_factory=Meters)
    timer: StepTimer = field(default_factory=StepTimer)
    step: int = 0
    best: float | None = None
    evaluations_without_better: int = 0
    evaluated_step: int = -1

    @property
    def finished(self) -> bool:
        """Whether the step budget is used up or early stopping has spoken."""
        patience_over = self.patience is not None and self.evaluations_without_better >= self.patience
        return self.step >= self.total_steps or patience_over

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Every parameter that the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def names(self) -> list[str]:
        """What every rank hands to the one collective of a step, whatever its batch produced."""
        losses = [f"{name}{suffix}" for name in self.detector.loss_names for suffix in ("", "_unscaled")]
        metrics = [f"{name}/{part}" for name in self.detector.metric_names for part in ("sum", "count")]
        return ["loss", *losses, *metrics, "grad_norm", "buffers_finite", "signal", "time_s"]

    def seed_micro_batch(self, micro: int) -> None:
        """Dropout and denoising noise become functions of (seed, step, rank, micro-batch): nothing to save."""
        seed_step(self.seed, self.step, self.accelerator.process_index, micro)

    def without_sync(self, more_to_come: bool):
        """Gradients are averaged over ranks once per window, at its last micro-batch."""
        return self.accelerator.no_sync(self.model) if more_to_come else nullcontext()

    def note_metric(self, row: Mapping[str, float]) -> bool:
        """Takes the metric for best from an evaluation row; True if it is the best so far.

        Raises:
            BadInput: the row has no such metric; the message lists those it has.
        """
        self.evaluated_step = self.step
        key = f"val/{self.metric_for_best}"
        if key not in row:
            known = ", ".join(sorted(name.removeprefix("val/") for name in row if name.startswith("val/")))
            raise BadInput(f"--eval.metric_for_best {self.metric_for_best}: no such metric; there are {known}")
        value = row[key]
        better = value is not None and (self.best is None or value > self.best)
        self.best = value if better else self.best
        self.evaluations_without_better = 0 if better else self.evaluations_without_better + 1
        return better

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
            "categories": self.categories,
            "sampler": self.sampler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "total_steps": self.total_steps,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "ema_updates": self.ema.updates if self.ema is not None else None,
            "guard": self.guard.state_dict(),
            "meters": self.meters.state_dict(),
            "budget": self.budget.state_dict() if self.budget is not None else None,
            "best": self.best,
            "evaluations_without_better": self.evaluations_without_better,
            "evaluated_step": self.evaluated_step,
            "metric_for_best": self.metric_for_best,
            "tracker": self.writer.state_dict(),
        }
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

    def load(self, checkpoint: Checkpoint, keep_schedule: bool = True) -> list[str]:
        """Takes up everything a checkpoint holds; returns in words what will not be identical.

        Args:
            checkpoint: verified by its manifest.
            keep_schedule: False: keep this command's learning-rate schedule and length.
        """
        self.load_weights(checkpoint)
        state = checkpoint.state
        self.step = state["step"]
        notes = self.sampler.load_state_dict(state["sampler"])
        if keep_schedule:
            self.schedule.load_state_dict(state["schedule"])
            self.total_steps = state["total_steps"]
            if self.budget is not None and state["budget"] is not None:
                self.budget.load_state_dict(state["budget"])
        self.schedule.set(self.step)
        self.guard.load_state_dict(state["guard"])
        self.meters.load_state_dict(state["meters"])
        self.evaluated_step = state["evaluated_step"]
        if state["metric_for_best"] == self.metric_for_best:
            self.best, self.evaluations_without_better = state["best"], state["evaluations_without_better"]
        else:
            notes.append(f"best metric starts anew: it was {state['metric_for_best']}, now {self.metric_for_best}")
        return notes

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Weights, their moving average, optimizer and scaler state of a checkpoint; nothing else."""
        self.detector.load_state_dict(checkpoint.tensors["model"])
        if "loss_weights" in checkpoint.tensors:
            self.weights.load_state_dict(checkpoint.tensors["loss_weights"])
        if self.ema is not None and "ema" in checkpoint.tensors:
            self.ema.module.load_state_dict(checkpoint.tensors["ema"])
            self.ema.updates = checkpoint.state["ema_updates"]
        elif self.ema is not None:
            self.ema.module.load_state_dict(checkpoint.tensors["model"])
        self.optimizer.load_state_dict(checkpoint.optimizer)
        if self.accelerator.scaler is not None and checkpoint.state["scaler"]:
            self.accelerator.scaler.load_state_dict(checkpoint.state["scaler"])

    def recover(
        self, action: Action, window: Sequence[Batch], denominators: Sequence[Mapping], reduced: Mapping, sums: Mapping
    ) -> None:
        """What follows a non-finite step, every rank alike: report, undo what the forward did, then as decided.

        Raises:
            StoppedByGuard: the policy says so; weights and state are those before the step, and saved.
        """
        if action is Action.CALIBRATE:  # the fp16 scaler looks for its scale: it skips this update by itself
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        self.guard.restore(self.detector)
        report = self._write_report(action, window, denominators, reduced, sums)
        self.guard.restore(self.detector)  # the report ran the forward again
        self.optimizer.zero_grad()
        where = f"step {self.step + 1}: a loss, gradient or buffer is not finite; the report is in {report}"
        if action is Action.STOP:
            self.save()
            raise StoppedByGuard(f"{where}. The weights before that step are saved; replay it with "
                                 f"`python scripts/replay.py {report}`")  # fmt: skip
        if action is Action.ROLLBACK:
            path, passed_over = newest_valid(self.folder / "checkpoints")
            if path is None:
                raise StoppedByGuard(f"{where}. No checkpoint to roll back to: {passed_over}")
            self.load_weights(path)
            self.step = path.step
            self.schedule.scale(self.guard.lr_factor)
            self.schedule.set(self.step)
            where += f"; back at step {self.step}, going on with the data after it"
        if self.accelerator.is_main_process:
            print(f"guard: {where}", flush=True)

    def _write_report(self, action, window, denominators, reduced, sums) -> Path:
        """The report folder of this rank; returns that of the lowest rank that broke."""
        rank = self.accelerator.process_index
        bad = [name for name, value in sums.items() if isinstance(value, Tensor) and not value.isfinite().all()]
        gradients = [
            name for name, p in self.detector.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
        ]

        def rerun() -> None:
            for micro, batch in enumerate(window):
                forward_loss(self, batch.to(self.accelerator.device), denominators[micro], micro)

        found = diagnose(self.detector, rerun)
        broke = bool(bad) or found.get("first_nonfinite_module") is not None
        ranks = [r for r, b in enumerate(_gather(broke)) if b] or list(range(self.accelerator.num_processes))
        folder = self.folder / "nan" / f"step_{self.step + 1:06d}"
        if rank in ranks:
            write_report(
                folder,
                step=self.step,
                epoch=self.sampler.epoch,
                rank=rank,
                seed=self.seed,
                losses=dict(reduced),
                bad_terms=bad,
                lr={group["name"]: group["lr"] for group in self.optimizer.param_groups},
                scale=self.accelerator.scaler.get_scale() if self.accelerator.scaler is not None else None,
                module=found,
                parameters=gradients,
                window=window,
                denominators=denominators,
                model_state=self.detector.state_dict(),
                policy=self.guard.policy,
                action=action.name,
            )
        self.accelerator.wait_for_everyone()
        return folder / f"rank{ranks[0]}"


def forward_loss(t: Training, batch: Batch, denominators: Mapping, micro: int) -> WeightedLosses:
    """Forward and weighted losses of one micro-batch, as the scripts' loops have them; for diagnosis and replay."""
    t.seed_micro_batch(micro)
    with t.accelerator.autocast():
        outputs = t.detector(batch.images, batch.sizes, batch.targets)
    losses, _ = t.detector.criterion(outputs, batch.targets, denominators)
    return t.weights(losses, t.step)


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


def _gather(value):
    """`value` of every rank, in rank order."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
