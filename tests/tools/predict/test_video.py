"""Videos: the same boxes as their frames as pictures, constant memory."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from toolkit.base.errors import BadInput
from toolkit.base.masks import boxes_around, rles_of
from toolkit.data.table import Category
from toolkit.evaluation.predictions import detections_as_json
from toolkit.tools.predict.in_tiles import tiled
from toolkit.tools.predict.predictor import Predictor
from toolkit.tools.predict.video import Video, VideoWriter, predict_video

av = pytest.importorskip("av", reason="PyAV is not installed: pip install av")
CATEGORIES = [Category(1, "square")]


def frame(index: int) -> np.ndarray:
    """A bright square that moves on a dark picture of noise."""
    picture = np.random.default_rng(index).integers(0, 60, (48, 64, 3), dtype=np.uint8)
    x = 3 + index % 44
    y = 5 + index // 2 % 28
    picture[y : y + 12, x : x + 12] = 250
    return picture


def write_video(path: Path, codec: str, pixels: str, frames, times_s=None, aspect=None) -> Path:
    """A film of 64 x 48. times_s: of each frame; None: as 25 frames a second say."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.pix_fmt = pixels
        stream.height = 48
        stream.width = 64
        if times_s is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for index, picture in enumerate(frames):
            encoded = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pixels)
            if times_s is not None:
                encoded.time_base = Fraction(1, 1000)
                encoded.pts = round(1000 * times_s[index])
            container.mux(stream.encode(encoded))
        container.mux(stream.encode())
    return path


def write_lossless(path: Path, frames) -> Path:
    return write_video(path, "ffv1", "bgr0", frames)


def find_squares(images, score_threshold):
    """The bright pixels' box, and their mean as score: any pixel that differs is seen."""
    found = []
    for image in images:
        rows, columns = (image[0] > 200).nonzero().unbind(1)
        box = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).float()
        score = image.float().mean()[None] / 255
        found.append({"boxes": box[None], "scores": score, "labels": torch.zeros(1).long()})
    return found


PREDICTOR = Predictor("squares", CATEGORIES, find_squares)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lossless_frames_have_the_boxes_of_their_pictures(tmp_path):
    frames = [frame(i) for i in range(30)]
    video = write_lossless(tmp_path / "film.mkv", frames)
    pictures = find_squares([torch.from_numpy(picture).permute(2, 0, 1) for picture in frames], 0)
    out = tmp_path / "out" / "film.jsonl"
    drawn = tmp_path / "out" / "film.mp4"
    assert predict_video(PREDICTOR, video, out, drawn) == (30, None)
    found = lines(out)
    assert [each["detections"] for each in found] == [detections_as_json(each, CATEGORIES) for each in pictures]
    assert [each["frame"] for each in found] == list(range(30))
    assert found[25]["time_s"] == pytest.approx(1.0, abs=0.01)
    with Video(drawn) as shown:
        assert {tuple(each.image.shape) for each in shown} == {(3, 48, 64)}
    assert predict_video(PREDICTOR, video, out, max_frames=7) == (7, None)
    assert len(lines(out)) == 7
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])  # it ends early
    count, _ = predict_video(PREDICTOR, video, out)
    assert 5 < count < 30
    assert len(lines(out)) == count


def test_masks_in_tiles_of_frames_are_those_of_the_frames(tmp_path):
    def find_masks(images, score_threshold):
        found = []
        for image in images:
            masks = image[:1] > 200
            masks = masks[masks.flatten(1).any(1)]
            scores = 0.5 + masks.flatten(1).sum(1) / 1000
            columns = {"boxes": boxes_around(masks), "scores": scores, "labels": torch.zeros(len(masks)).long()}
            found.append(columns | {"masks": rles_of(masks)})
        return found

    frames = [frame(index) for index in range(0, 60, 7)]
    video = write_lossless(tmp_path / "film.mkv", frames)
    predictor = tiled(Predictor("masks", CATEGORIES, find_masks, masks=True), 24)
    predict_video(predictor, video, tmp_path / "film.jsonl")
    for line, picture in zip(lines(tmp_path / "film.jsonl"), frames, strict=True):
        (one,) = line["detections"]
        (mask,) = rles_of(torch.from_numpy(picture[None, :, :, 0] > 200))
        assert one["segmentation"] == mask.as_json()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_length(tmp_path):
    video = write_lossless(tmp_path / "film.mkv", (frame(i) for i in range(1000)))
    process = psutil.Process()
    used = []

    def measure():
        used.append(process.memory_info().rss)

    out = (tmp_path / "film.jsonl", tmp_path / "film.mp4")
    predict_video(PREDICTOR, video, *out, batch_size=4, on_frame=measure)
    assert len(used) == 1000
    assert (max(used[900:]) - max(used[100:200])) / 2**20 < 20


@pytest.mark.parametrize("name", ["film.mp4", "film.mkv", "film.ts"])
@pytest.mark.parametrize("begin_s", [0, 5])
def test_frames_keep_their_times_and_begin_at_0(tmp_path, name, begin_s):
    """Of a variable rate, as of a phone or a screen."""
    times_s = [0, 0.04, 0.08, 1, 1.04, 2, 2.96]
    frames = [frame(index) for index in range(7)]
    source = write_video(
        tmp_path / name,
        "mpeg4",
        "yuv420p",
        frames,
        [begin_s + time_s for time_s in times_s],
    )
    out = tmp_path / "out.jsonl"
    drawn = tmp_path / "out.mp4"
    predict_video(PREDICTOR, source, out, drawn, batch_size=2)
    assert [each["time_s"] for each in lines(out)] == pytest.approx(times_s, abs=0.002)
    with av.open(str(drawn)) as container:
        assert [each.time for each in container.decode(video=0)] == pytest.approx(times_s, abs=0.002)
        stream = container.streams.video[0]
        assert 2.96 < float(stream.duration * stream.time_base) < 3.5


def written(path: Path, pictures, times_s) -> Path:
    writer = VideoWriter(path, Fraction(10))
    for picture, time_s in zip(pictures, times_s, strict=True):
        writer.add(picture, time_s)
    writer.close()
    return path


def test_frames_without_a_time_or_with_one_of_the_past_follow_by_the_rate(tmp_path):
    times_s = (None, None, 1.0, 0.2, None, 1.15, 2.0)
    with Video(written(tmp_path / "film.mp4", [frame(0)] * 7, times_s)) as video:
        found = [each.time_s for each in video]
    assert found == pytest.approx([0, 0.1, 1.0, 1.1, 1.2, 1.3, 2.0], abs=1e-3)


def test_sides_that_are_odd_are_written(tmp_path):
    black = np.zeros((33, 51, 3), np.uint8)
    with Video(written(tmp_path / "odd.mp4", [black] * 3, [None] * 3)) as video:
        assert [tuple(each.image.shape) for each in video] == [(3, 32, 50)] * 3


@pytest.mark.parametrize("source", ["none.mp4", "text.mp4", 4711])
def test_what_is_not_a_video_is_refused(tmp_path, source):
    (tmp_path / "text.mp4").write_text("nothing")
    with pytest.raises(BadInput, match="no video that can be read"):
        Video(source if source == 4711 else tmp_path / source)


def display_matrix(a: int, b: int, c: int, d: int) -> bytes:
    """The part of an MP4 file that says how a picture is turned, of its four numbers."""
    numbers = (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return b"".join(number.to_bytes(4, "big", signed=True) for number in numbers)


@pytest.mark.parametrize(("quarters", "matrix"), [(-1, (0, 1, -1, 0)), (1, (0, -1, 1, 0)), (2, (-1, 0, 0, -1))])
def test_frames_of_a_phone_are_upright(tmp_path, quarters, matrix):
    path = written(tmp_path / "phone.mp4", [frame(index) for index in range(3)], [None] * 3)
    with Video(path) as video:
        stored = next(iter(video)).image
    raw = path.read_bytes()
    at = raw.index(display_matrix(1, 0, 0, 1), raw.index(b"tkhd"))
    path.write_bytes(raw[:at] + display_matrix(*matrix) + raw[at + 36 :])
    with Video(path) as video:
        shown = next(iter(video)).image
    assert torch.equal(shown, torch.rot90(stored, quarters, (1, 2)))  # counterclockwise


@pytest.mark.parametrize(("aspect", "size_hw"), [(Fraction(4, 3), (48, 85)), (Fraction(8, 9), (54, 64))])
def test_pixels_that_are_not_square_become_square(tmp_path, aspect, size_hw):
    path = write_video(tmp_path / "old.avi", "mpeg4", "yuv420p", [frame(0), frame(1)], aspect=aspect)
    with Video(path) as video:
        assert tuple(next(iter(video)).image.shape[1:]) == size_hw
