"""Predicts on videos and cameras, and writes JSON lines and drawn frames; the memory needed does not depend on the
length.

Videos are read and written by PyAV (the extra `video`).
"""

import json
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from fractions import Fraction
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.base.imports import import_extra
from toolkit.evaluation.draw import picture_with_boxes
from toolkit.tools.predict.predict_each import predict_each
from toolkit.tools.predict.predictor import Predictor

VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".wmv", ".flv"})
TICK_S = Fraction(1, 60000)  # of the times in written videos; MPEG-4 takes no denominator above 65535
CAMERAS = {"Linux": ("v4l2", "/dev/video{}"), "Darwin": ("avfoundation", "{}")}


class Frame(NamedTuple):
    """A frame of a video. index: from 0; time_s: from the first frame, as the file says; image: uint8 (3, H, W) RGB,
    upright."""

    index: int
    time_s: float
    image: Tensor


class Video(AbstractContextManager):
    """A video file or camera, whose frames can be iterated over once; use it in a `with` statement.

    source: path of the file, or number of the camera.

    Attributes:
        rate: frames per second, on average; that of single frames may differ.
        broken: why the video ended early, set at the end of the iteration; None: it did not.

    Raises:
        BadInput: PyAV is not installed, the file or camera does not exist, or it has no video.
    """

    def __init__(self, source: Path | int):
        av = import_extra("av", "video", "videos")
        name = str(source)
        kind = None
        if isinstance(source, int):
            kind, name = CAMERAS.get(platform.system(), CAMERAS["Linux"])
            name = name.format(source)
        try:
            self._container = av.open(name, format=kind)
            self._stream = self._container.streams.video[0]
        except (OSError, ValueError, IndexError, EOFError) as error:  # each of PyAV's errors is one of them
            raise BadInput(f"{name}: no video that can be read: {error}") from error
        self._stream.thread_type = "AUTO"
        self.rate = Fraction(self._stream.average_rate or 25).limit_denominator(65535)
        self.broken: str | None = None

    def __exit__(self, *_) -> None:
        self._container.close()

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames from the first to the last."""
        av = import_extra("av", "video", "videos")
        begin_s = None  # a stream, a part of a film and a camera begin at any time
        time_s = 0.0
        try:
            for index, frame in enumerate(self._container.decode(self._stream)):
                if frame.time is not None:
                    begin_s = frame.time - time_s if begin_s is None else begin_s
                    time_s = frame.time - begin_s
                yield Frame(index, time_s, torch.from_numpy(self._upright(frame)).permute(2, 0, 1))
                time_s += float(1 / self.rate)  # of a frame whose time the file does not say
        except av.FFmpegError as error:
            self.broken = str(error)

    def _upright(self, frame) -> np.ndarray:
        """Return the pixels (H, W, 3) of a frame as a player shows them: square, and turned as the container says.

        Phones store the picture of the sensor and how the phone was held; old cameras store pixels that are not square.
        """
        aspect = self._stream.sample_aspect_ratio or self._stream.codec_context.sample_aspect_ratio or 1
        height, width = frame.height, frame.width
        if aspect > 1:
            width = round(width * aspect)
        elif 0 < aspect < 1:
            height = round(height / aspect)
        pixels = frame.to_ndarray(format="rgb24", width=width, height=height)
        quarters = round(frame.rotation / 90)  # counterclockwise, as NumPy turns
        return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters % 4 else pixels


class VideoWriter:
    """Writes frames of one size to an MP4 file, in H.264 if PyAV has it, else in MPEG-4.

    The file is created when the first frame is added. rate: frames per second, for frames that have no time, and for
    how long the last one is shown.
    """

    def __init__(self, path: Path, rate: Fraction):
        self.path = path
        self.rate = rate
        self._container = None
        self._last_tick = -1
        self._due_tick = 0  # of a frame that has no time, or none after that of the frame before

    def add(self, pixels: np.ndarray, time_s: float | None = None) -> None:
        """Write a frame, uint8 (H, W, 3) RGB, shown from `time_s` on; None: as the rate says.

        If a side is odd, the last row or column is left out, because the format needs even sides.
        """
        av = import_extra("av", "video", "videos")
        pixels = np.ascontiguousarray(pixels[: pixels.shape[0] // 2 * 2, : pixels.shape[1] // 2 * 2])
        if self._container is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._container = av.open(str(self.path), "w")
            codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
            self._stream = self._container.add_stream(codec, rate=self.rate)
            self._stream.height, self._stream.width = pixels.shape[:2]
            self._stream.pix_fmt = "yuv420p"
            self._stream.codec_context.time_base = TICK_S
            self._stream.codec_context.max_b_frames = 0  # with them, the length in the file is wrong
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.time_base = TICK_S
        frame.pts = self._tick_of(time_s)
        self._container.mux(self._stream.encode(frame))

    def _tick_of(self, time_s: float | None) -> int:
        """Return the tick of a frame, which is after that of the frame before."""
        asked = -1 if time_s is None else round(time_s / TICK_S)
        tick = asked if asked > self._last_tick else self._due_tick
        self._last_tick = tick
        self._due_tick = tick + max(1, round(1 / (self.rate * TICK_S)))
        return tick

    def close(self) -> None:
        """Write the remaining frames and close the file."""
        if self._container is not None:
            self._container.mux(self._stream.encode())
            self._container.close()


def predict_video(
    predictor: Predictor,
    source: Path | int,
    lines: Path,
    drawn: Path | None = None,
    *,
    batch_size: int = 8,
    score_threshold: float = 0.3,
    max_frames: int | None = None,
    on_frame=lambda: None,
) -> tuple[int, str | None]:
    """Predict on every frame of a video or camera, and write the detections.

    Args:
        source: path of a video file, or number of a camera.
        lines: file to write, with one JSON object per frame: `frame` (from 0), `time_s` (from the first one), and
            `detections` as in predictions.json.
        drawn: MP4 file to write, with the frames and their boxes; None: it is not written.
        score_threshold: only detections with a higher score are written.
        max_frames: number of frames after which to stop; None: stop at the end, which a camera does not have.
        on_frame: called without arguments after each frame.

    Returns:
        the number of frames, and why the video ended early; None if it did not.
    """
    count = 0
    lines.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        video = stack.enter_context(Video(source))
        text = stack.enter_context(lines.open("w", encoding="utf-8"))
        writer = VideoWriter(drawn, video.rate) if drawn is not None else None
        if writer is not None:
            stack.callback(writer.close)
        how = {"score_threshold": score_threshold, "batch_size": batch_size}
        for prediction in predict_each(predictor, islice(video, max_frames), attrgetter("image"), **how):
            frame = prediction.key
            entry = {
                "frame": frame.index,
                "time_s": round(frame.time_s, 6),
                **predictor.as_json(prediction.detections),
            }
            text.write(json.dumps(entry) + "\n")
            if writer is not None:
                picture = picture_with_boxes(
                    frame.image,
                    prediction.detections,
                    predictor.class_names,
                    smallest_side=1,
                )
                writer.add(np.asarray(picture), frame.time_s)
            count += 1
            on_frame()
    return count, video.broken
