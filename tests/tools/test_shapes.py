"""The bundled data: deterministic, sensible, made once."""

import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import pytest

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.tools.shapes import (
    CLASSES,
    PREDICATES,
    draw_large_scene,
    draw_scene,
    ensure_shapes,
    main,
    make_shapes,
)

SIZES = {"train_images": 3, "val_images": 2, "image_size": 64}


def digests(folder) -> dict:
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_a_seed_gives_the_same_bytes_whatever_the_number_of_images(tmp_path):
    make_shapes(tmp_path / "a", **SIZES, seed=3)
    make_shapes(tmp_path / "b", **SIZES, seed=3)
    make_shapes(tmp_path / "more", **SIZES | {"train_images": 5}, seed=3)
    make_shapes(tmp_path / "other", **SIZES, seed=4)
    a = digests(tmp_path / "a")
    more = digests(tmp_path / "more")
    assert a == digests(tmp_path / "b")
    assert len(set(a.values())) == len(a) == 7
    assert {name for name in a if a[name] == more[name]} >= {name for name in a if name.endswith(".jpg")}
    assert not set(a.values()) & set(digests(tmp_path / "other").values())


def test_scenes_have_what_is_promised():
    scenes = [draw_scene(0, "train", index) for index in range(60)]
    assert {len(objects) for _, objects, _ in scenes} == set(range(1, 7))
    assert {item["category"] for _, objects, _ in scenes for item in objects} == set(range(len(CLASSES)))
    assert {predicate for _, _, triples in scenes for *_, predicate in triples} == set(range(len(PREDICATES)))
    for pixels, objects, _ in scenes:
        assert pixels.shape == (128, 128, 3)
        assert pixels.dtype == np.uint8
        for item in objects:
            x, y, w, h = item["bbox"]
            assert min(x, y) >= 0
            assert min(w, h) >= 4
            assert max(x + w, y + h) <= 128
            assert 0 < item["area"] <= w * h


def test_scenes_are_those_of_the_version():
    """Of shapes.SHAPES_VERSION 4, which is to be raised where pictures change."""
    pixels, objects, _ = draw_scene(0, "train", 1)
    assert [item["area"] for item in objects] == pytest.approx([737, 1013, 436, 810, 1676, 777], abs=2)
    assert pixels.mean(axis=(0, 1)) == pytest.approx([120.40, 112.33, 102.23], abs=0.05)
    assert pixels.std() == pytest.approx(58.35, abs=0.05)


def test_large_pictures_have_small_shapes_that_do_not_overlap(tmp_path):
    pixels, objects, relations = draw_large_scene(0, "train", 1)
    assert pixels.shape == (1500, 2000, 3)
    assert not relations
    assert 40 <= len(objects) <= 80
    seen = np.zeros((1500, 2000), int)
    for item in objects:
        x, y, w, h = item["bbox"]
        assert 5 <= min(w, h)
        assert max(w, h) <= 24
        seen[y : y + h, x : x + w] += 1
    assert seen.max() == 1
    again, *_ = draw_large_scene(0, "train", 1)
    assert np.array_equal(pixels, again)
    make_shapes(tmp_path / "d", 1, 1, large=True)
    table = open_dataset("train", path=tmp_path / "d", cache_dir=tmp_path / "cache")
    assert table.sizes_hw().tolist() == [[1500, 2000]]
    assert table.num_boxes()[0] >= 40


INVERSE = {
    "left of": "right of",
    "above": "below",
    "inside": "contains",
    "overlaps": "overlaps",
}
INVERSE |= {there: back for back, there in INVERSE.items()}


def holds(predicate: str, subject: dict, object_: dict) -> bool:
    sx, sy, sw, sh = subject["bbox"]
    ox, oy, ow, oh = object_["bbox"]
    same_or_inside = sx >= ox and sy >= oy and sx + sw <= ox + ow and sy + sh <= oy + oh
    match predicate:
        case "left of":
            return sx + sw / 2 < ox + ow / 2
        case "above":
            return sy + sh / 2 < oy + oh / 2
        case "inside":
            return same_or_inside
        case "overlaps":
            return min(sx + sw, ox + ow) > max(sx, ox) and min(sy + sh, oy + oh) > max(sy, oy)
        case "larger than":
            return subject["area"] > 3 * object_["area"]
    return holds(INVERSE[predicate], object_, subject)


@pytest.mark.parametrize("index", range(40))
def test_relations_agree_with_the_boxes(index):
    _, objects, triples = draw_scene(1, "val", index)
    named = {(s, o, PREDICATES[p]) for s, o, p in triples}
    assert len(named) == len(triples)
    for s, o, predicate in named:
        assert holds(predicate, objects[s], objects[o])
        if predicate in INVERSE and s < o and objects[s]["bbox"] != objects[o]["bbox"]:
            assert (o, s, INVERSE[predicate]) in named


def test_the_files_are_an_ordinary_data_set_with_relations(tmp_path, capsys):
    arguments = [
        "--out",
        str(tmp_path / "set"),
        "--train-images",
        "2",
        "--val-images",
        "3",
        "--image-size",
        "64",
    ]
    assert main(arguments) == 0
    assert len(list((tmp_path / "set" / "train").iterdir())) == 2
    assert main(arguments) == 2
    assert "not an empty folder" in capsys.readouterr().err
    table = open_dataset(tmp_path / "set" / "annotations" / "val.json", cache_dir=tmp_path / "cache")
    assert len(table) == 3
    assert not table.problems
    assert table.predicates == PREDICATES
    assert table.class_names == list(CLASSES)
    for index in range(3):
        _, objects, triples = draw_scene(0, "val", index, 64)
        row = table.row(index)
        assert np.stack(list(row["relations"].values()), 1).tolist() == [list(triple) for triple in triples]
        assert row["objects"]["area"].tolist() == [item["area"] for item in objects]


def test_two_processes_make_it_once(tmp_path):
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        (folder,) = {*pool.map(partial(ensure_shapes, **SIZES), [tmp_path] * 2)}
    assert [*tmp_path.iterdir()] == [folder]  # no half-made copies
    before = (folder / "annotations" / "val.json").stat().st_mtime_ns
    assert ensure_shapes(tmp_path, **SIZES) == folder
    assert (folder / "annotations" / "val.json").stat().st_mtime_ns == before


def test_no_images_and_a_file_in_the_way_are_refused(tmp_path):
    with pytest.raises(BadInput, match="at least one"):
        make_shapes(tmp_path / "new", 0, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="DETECTION_TOOLKIT_CACHE"):
        ensure_shapes(tmp_path / "file")


@pytest.mark.slow
def test_the_default_data_set_opens(tmp_path):
    assert len(open_dataset("train", format="shapes", cache_dir=tmp_path)) == 1000
    assert len(open_dataset("val", format="shapes", cache_dir=tmp_path)) == 200
