"""When a run evaluates, saves and updates."""

from dataclasses import dataclass


@dataclass
class Pace:
    """When a run does what, in optimizer steps (0: never, or only at the end), and how it accumulates.

    accumulation_steps, accumulate_after_epoch: micro-batches of a step, and the first epoch in which it has them.
    denominators: "global" or "original", see `window_denominators`.
    bn_momentum: momentum of batch norms at the end and steps of the warm-up before it changes; None: it stays.
    plain_epochs: last epochs without mixup and mosaic, see `MixedDataset.plan`.
    warmup_steps: of the learning rate; a run that is shorter is warned of.
    """

    eval_every: int = 0
    save_every: int = 0
    keep: int = 2
    keep_every: int = 0
    gradient_table_every: int = 0
    accumulation_steps: int = 1
    accumulate_after_epoch: int = 0
    denominators: str = "global"
    bn_momentum: tuple[float, int] | None = None
    plain_epochs: float = 0.0
    warmup_steps: int = 0

    @property
    def accumulation(self) -> tuple[int, int]:
        return self.accumulation_steps, self.accumulate_after_epoch
