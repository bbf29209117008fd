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

SIZES = {"train_images": 6, "val_images": 3, "image_size": 64}


def digests(folder):
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def test_same_seed_same_bytes_and_every_image_on_its_own(tmp_path):
    make_shapes(tmp_path / "a", **SIZES, seed=3)
    make_shapes(tmp_path / "b", **SIZES, seed=3)
    make_shapes(tmp_path / "more", **SIZES | {"train_images": 9}, seed=3)
    make_shapes(tmp_path / "other", **SIZES, seed=4)
    a, more = digests(tmp_path / "a"), digests(tmp_path / "more")
    assert a == digests(tmp_path / "b")
    images = [name for name in a if name.endswith(".jpg")]
    assert all(a[name] == more[name] for name in images) and len(set(a.values())) == len(a) == 11
    assert not set(a.values()) & set(digests(tmp_path / "other").values())


def test_scenes_are_as_promised():
    scenes = [draw_scene(0, "train", index) for index in range(60)]
    assert {len(objects) for _, objects, _ in scenes} == set(range(1, 7))
    assert {item["category"] for _, objects, _ in scenes for item in objects} == set(range(len(CLASSES)))
    assert {predicate for _, _, triples in scenes for *_, predicate in triples} == set(range(len(PREDICATES)))
    for pixels, objects, _ in scenes:
        assert pixels.shape == (128, 128, 3) and pixels.dtype == np.uint8
        for item in objects:
            x, y, w, h = item["bbox"]
            assert 0 <= x and 0 <= y and w >= 4 and h >= 4 and x + w <= 128 and y + h <= 128
            assert 0 < item["area"] <= w * h
    pixels, objects, _ = scenes[1]  # of shapes.SHAPES_VERSION 4, which is to be raised where pictures change
    assert [item["area"] for item in objects] == pytest.approx([737, 1013, 436, 810, 1676, 777], abs=2)
    assert pixels.mean(axis=(0, 1)) == pytest.approx([120.40, 112.33, 102.23], abs=0.05)
    assert pixels.std() == pytest.approx(58.35, abs=0.05)


def test_large_pictures_have_small_shapes_that_do_not_overlap(tmp_path):
    pixels, objects, relations = draw_large_scene(0, "train", 1)
    assert pixels.shape == (1500, 2000, 3) and not relations and 40 <= len(objects) <= 80
    seen = np.zeros((1500, 2000), int)
    for item in objects:
        x, y, w, h = item["bbox"]
        assert 5 <= min(w, h) and max(w, h) <= 24
        seen[y : y + h, x : x + w] += 1
    assert seen.max() == 1
    again, *_ = draw_large_scene(0, "train", 1)
    assert np.array_equal(pixels, again)
    make_shapes(tmp_path / "d", 1, 1, large=True)
    table = open_dataset("train", path=tmp_path / "d", cache_dir=tmp_path / "cache")
    assert table.sizes_hw().tolist() == [[1500, 2000]] and table.num_boxes()[0] >= 40


def test_relations_agree_with_the_boxes():
    inverse = {"left of": "right of", "above": "below", "inside": "contains", "overlaps": "overlaps"}
    inverse |= {there: back for back, there in inverse.items()}
    for index in range(40):
        _, objects, triples = draw_scene(1, "val", index)
        named = {(s, o, PREDICATES[p]) for s, o, p in triples}
        assert len(named) == len(triples)
        for s, o, predicate in named:
            (sx, sy, sw, sh), (ox, oy, ow, oh) = objects[s]["bbox"], objects[o]["bbox"]
            assert {
                "left of": sx + sw / 2 < ox + ow / 2, "right of": sx + sw / 2 > ox + ow / 2,
                "above": sy + sh / 2 < oy + oh / 2, "below": sy + sh / 2 > oy + oh / 2,
                "inside": sx >= ox and sy >= oy and sx + sw <= ox + ow and sy + sh <= oy + oh,
                "contains": sx <= ox and sy <= oy and sx + sw >= ox + ow and sy + sh >= oy + oh,
                "overlaps": min(sx + sw, ox + ow) > max(sx, ox) and min(sy + sh, oy + oh) > max(sy, oy),
                "larger than": objects[s]["area"] > 3 * objects[o]["area"],
            }[predicate]  # fmt: skip
            if predicate in inverse and s < o and objects[s]["bbox"] != objects[o]["bbox"]:
                assert (o, s, inverse[predicate]) in named


def test_the_files_are_an_ordinary_data_set_with_relations(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "set"), "--train-images", "2", "--val-images", "3", "--image-size", "64"]
    assert main(arguments) == 0 and len(list((tmp_path / "set" / "train").iterdir())) == 2
    assert main(arguments) == 2 and "not an empty folder" in capsys.readouterr().err
    table = open_dataset(tmp_path / "set" / "annotations" / "val.json", cache_dir=tmp_path / "cache")
    assert len(table) == 3 and table.problems == [] and table.predicates == PREDICATES
    assert table.class_names == list(CLASSES)
    for index in range(3):
        _, objects, triples = draw_scene(0, "val", index, 64)
        row = table.row(index)
        assert [list(t) for t in triples] == np.stack(list(row["relations"].values()), 1).tolist()
        assert row["objects"]["area"].tolist() == [item["area"] for item in objects]


def test_two_processes_make_it_once(tmp_path):
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        (folder,) = {*pool.map(partial(ensure_shapes, **SIZES), [tmp_path] * 2)}
    assert [*tmp_path.iterdir()] == [folder]  # no half-made copies
    before = (folder / "annotations" / "val.json").stat().st_mtime_ns
    assert ensure_shapes(tmp_path, **SIZES) == folder
    assert (folder / "annotations" / "val.json").stat().st_mtime_ns == before


def test_refusals(tmp_path):
    with pytest.raises(BadInput, match="at least one"):
        make_shapes(tmp_path / "new", 0, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="DETECTION_TOOLKIT_CACHE"):
        ensure_shapes(tmp_path / "file")


@pytest.mark.slow
def test_the_default_data_set_opens(tmp_path):
    assert len(open_dataset("train", format="shapes", cache_dir=tmp_path)) == 1000
    assert len(open_dataset("val", format="shapes", cache_dir=tmp_path)) == 200
