"""Videos: the same boxes as their frames as pictures, constant memory."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.table import Category
from toolkit.evaluation.predictions import detections_as_json
from toolkit.tools.predict.predict_each import predict_files
from toolkit.tools.predict.predictor import Predictor
from toolkit.tools.predict.video import Video, VideoWriter, predict_video

av = pytest.importorskip("av", reason="PyAV is not installed: pip install av")
CATEGORIES = [Category(1, "square")]


def frame(index: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A bright square that moves on a dark picture of noise."""
    picture = np.random.default_rng(index).integers(0, 60, (height, width, 3), dtype=np.uint8)
    x, y = 3 + index % (width - 20), 5 + index // 2 % (height - 20)
    picture[y : y + 12, x : x + 12] = 250
    return picture


def write_lossless(path: Path, frames) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=Fraction(25))
        stream.pix_fmt, stream.height, stream.width = "bgr0", 48, 64
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode())
    return path


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
    paths = [tmp_path / f"{i:03d}.png" for i in range(30)]
    for path, picture in zip(paths, frames, strict=True):
        Image.fromarray(picture).save(path)
    of_files = {each.key: detections_as_json(each.detections, CATEGORIES) for each in predict_files(PREDICTOR, paths)}
    out, drawn = tmp_path / "out" / "film.jsonl", tmp_path / "out" / "film.mp4"
    assert predict_video(PREDICTOR, video, out, drawn) == (30, None)
    found = lines(out)
    assert [each["detections"] for each in found] == [of_files[path] for path in paths]
    assert [each["frame"] for each in found] == list(range(30))
    assert found[25]["time_s"] == pytest.approx(1.0, abs=0.01)
    with Video(drawn) as pictures:
        assert {tuple(each.image.shape) for each in pictures} == {(3, 48, 64)}
    assert predict_video(PREDICTOR, video, out, max_frames=7) == (7, None) and len(lines(out)) == 7
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])  # it ends early
    count, _ = predict_video(PREDICTOR, video, out)
    assert 5 < count < 30 and len(lines(out)) == count


@pytest.mark.slow
def test_memory_does_not_grow_with_the_length(tmp_path):
    video = write_lossless(tmp_path / "film.mkv", (frame(i) for i in range(1000)))
    used, process = [], psutil.Process()
    predict_video(
        PREDICTOR, video, tmp_path / "film.jsonl", tmp_path / "film.mp4", batch_size=4,
        on_frame=lambda: used.append(process.memory_info().rss),
    )  # fmt: skip
    assert len(used) == 1000 and (max(used[900:]) - max(used[100:200])) / 2**20 < 20


@pytest.mark.parametrize("name", ["film.mp4", "film.mkv", "film.ts"])
@pytest.mark.parametrize("begin_s", [0, 5])
def test_frames_keep_their_times_and_begin_at_0(tmp_path, name, begin_s):
    """Of a variable rate, as of a phone or a screen."""
    times_s = [0, 0.04, 0.08, 1, 1.04, 2, 2.96]
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.pix_fmt, stream.height, stream.width = "yuv420p", 48, 64
        stream.codec_context.time_base = Fraction(1, 1000)
        for index, time_s in enumerate(times_s):
            picture = av.VideoFrame.from_ndarray(frame(index), format="rgb24").reformat(format="yuv420p")
            picture.time_base = Fraction(1, 1000)
            picture.pts = round(1000 * (begin_s + time_s))
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    out, drawn = tmp_path / "out.jsonl", tmp_path / "out.mp4"
    predict_video(PREDICTOR, tmp_path / name, out, drawn, batch_size=2)
    assert [each["time_s"] for each in lines(out)] == pytest.approx(times_s, abs=0.002)
    with av.open(str(drawn)) as container:
        assert [each.time for each in container.decode(video=0)] == pytest.approx(times_s, abs=0.002)
        stream = container.streams.video[0]
        shown_s = float(stream.duration * stream.time_base)
        assert 2.96 < shown_s < 3.5


def test_frames_without_a_time_or_with_one_of_the_past_follow_by_the_rate(tmp_path):
    writer = VideoWriter(tmp_path / "film.mp4", Fraction(10))
    for time_s in (None, None, 1.0, 0.2, None, 1.15, 2.0):
        writer.add(frame(0), time_s)
    writer.close()
    with Video(tmp_path / "film.mp4") as video:
        times_s = [each.time_s for each in video]
    assert times_s == pytest.approx([0, 0.1, 1.0, 1.1, 1.2, 1.3, 2.0], abs=1e-3)


def test_sides_that_are_odd_are_written(tmp_path):
    writer = VideoWriter(tmp_path / "odd.mp4", Fraction(10))
    for _ in range(3):
        writer.add(np.zeros((33, 51, 3), np.uint8))
    writer.close()
    with Video(tmp_path / "odd.mp4") as video:
        assert [tuple(each.image.shape) for each in video] == [(3, 32, 50)] * 3


def test_what_is_no_video_is_bad_input(tmp_path):
    (tmp_path / "text.mp4").write_text("nothing")
    for source in (tmp_path / "none.mp4", tmp_path / "text.mp4", 4711):
        with pytest.raises(BadInput, match="no video that can be read"):
            Video(source)


IDENTITY = bytes.fromhex("00010000" + "0" * 24 + "00010000" + "0" * 24 + "40000000")
TURNED = {  # display matrices of an MP4 file, and how the picture is turned, counterclockwise in quarters
    -1: bytes.fromhex("00000000" + "00010000" + "00000000" + "ffff0000" + "0" * 32 + "40000000"),
    1: bytes.fromhex("00000000" + "ffff0000" + "00000000" + "00010000" + "0" * 32 + "40000000"),
    2: bytes.fromhex("ffff0000" + "0" * 24 + "ffff0000" + "0" * 24 + "40000000"),
}


@pytest.mark.parametrize("quarters", TURNED)
def test_frames_of_a_phone_are_upright(tmp_path, quarters):
    path = tmp_path / "phone.mp4"
    writer = VideoWriter(path, Fraction(10))
    for index in range(3):
        writer.add(frame(index))
    writer.close()
    with Video(path) as video:
        stored = next(iter(video)).image
    raw = path.read_bytes()
    at = raw.index(IDENTITY, raw.index(b"tkhd"))
    path.write_bytes(raw[:at] + TURNED[quarters] + raw[at + 36 :])
    with Video(path) as video:
        shown = next(iter(video)).image
    assert torch.equal(shown, torch.rot90(stored, quarters, (1, 2)))


@pytest.mark.parametrize(("aspect", "size_hw"), [(Fraction(4, 3), (48, 85)), (Fraction(8, 9), (54, 64))])
def test_pixels_that_are_not_square_become_square(tmp_path, aspect, size_hw):
    path = tmp_path / "anamorphic.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.pix_fmt, stream.height, stream.width = "yuv420p", 48, 64
        stream.codec_context.sample_aspect_ratio = aspect
        for index in range(2):
            picture = av.VideoFrame.from_ndarray(frame(index), format="rgb24")
            container.mux(stream.encode(picture.reformat(format="yuv420p")))
        container.mux(stream.encode())
    with Video(path) as video:
        assert tuple(next(iter(video)).image.shape[1:]) == size_hw
