"""Trackers that only Accelerate knows: rows and settings, through its own class."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from toolkit.runs.trackers.tracker import About, Tracker, flat


class AccelerateTracker(Tracker):
    def start(self, folder: Path, about: About, is_new: bool, was_closed: bool) -> None:
        kind = LOGGER_TYPE_TO_CLASS[self.name]
        place = {"logging_dir": str(folder)} if kind.requires_logging_directory else {}
        self._inner = kind(about.project, **place)
        self._inner.start()
        self._inner.store_init_configuration(flat(about.config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._inner.log(dict(values), step=step)

    def show(self, shown, step: int) -> None:
        if hasattr(self._inner, "log_images") and shown.grid is not None:
            self._inner.log_images({"val/predictions": np.asarray(shown.grid)[None]}, step=step)

    def close(self, state: str) -> None:
        self._inner.finish()
