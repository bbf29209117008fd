"""check_data.py on planted faults, the clean copy, and the split that keeps images that look alike together.

Run with `pytest tests/test_check_data.py -n 0`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from toolkit.data import inspection, near_duplicates
from toolkit.data.formats import open_dataset
from toolkit.data.inspection import near_boxes
from toolkit.data.near_duplicates import ImageSignatures, alike_pairs, groups, held_out, signatures_of
from toolkit.data.shapes import draw_scene, make_shapes
from toolkit.data.splits import hold_out, open_split, open_splits, share_of, share_that_came_out
from toolkit.errors import BadInput

ROOT = Path(__file__).resolve().parent.parent
BCCD = Path(os.environ.get("DETECTION_TOOLKIT_BCCD") or Path(__file__).parents[2] / "shared" / "data" / "bccd")


@pytest.fixture
def check(monkeypatch, tmp_path):
    """`check(*arguments)` -> exit code of scripts/check_data.py."""
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sys.modules.pop("check_data", None)
    import check_data

    return lambda *arguments: check_data.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean") / "d"
    make_shapes(folder, 24, 8, 64)
    return folder


def planted(clean, folder):
    """A copy with leakage, duplicates, a box given twice, an unused class and a class that validation lacks."""
    shutil.copytree(clean, folder)
    documents = {
        split: json.loads((folder / "annotations" / f"{split}.json").read_text()) for split in ("train", "val")
    }
    train, val = documents["train"], documents["val"]
    shutil.copy(folder / "val" / val["images"][2]["file_name"], folder / "train" / train["images"][3]["file_name"])
    shutil.copy(folder / "train" / train["images"][5]["file_name"], folder / "train" / train["images"][6]["file_name"])
    near = Image.open(folder / "val" / val["images"][4]["file_name"])
    ImageEnhance.Brightness(near).enhance(1.1).save(folder / "train" / train["images"][8]["file_name"], quality=60)
    box = next(a for a in train["annotations"] if a["image_id"] == train["images"][0]["id"])
    x, y, w, h = box["bbox"]
    train["annotations"].append({**box, "id": 10**6, "bbox": [x, y, max(1, w - 0.5), h]})
    for document in documents.values():
        document["categories"].append({"id": 99, "name": "never"})
        document["annotations"] = [a for a in document["annotations"] if document is train or a["category_id"] != 1]
    for split, document in documents.items():
        left = {a["id"] for a in document["annotations"]}
        document["rel_annotations"] = [
            r for r in document["rel_annotations"] if {r["subject_id"], r["object_id"]} <= left
        ]
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(document))
    return folder


def test_a_clean_set_has_exit_code_0(clean, check, tmp_path, capsys):
    assert check(clean, "--json", tmp_path / "r.json", "--image-size", 64) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["exit_code"] == 0 and report["splits"]["train"]["images"] == 24
    assert "COCO, splits train, val" in capsys.readouterr().out


def test_planted_faults_are_all_found_and_mended(clean, check, tmp_path):
    folder = planted(clean, tmp_path / "planted")
    assert check(folder, "--json", tmp_path / "r.json", "--fix", tmp_path / "fixed", "--image-size", 64) == 1
    kinds = {each["kind"]: each["items"] for each in json.loads((tmp_path / "r.json").read_text())["findings"]}
    train, val = ([path.name for path in sorted((folder / split).iterdir())] for split in ("train", "val"))
    assert kinds["same file in two splits"] == [[f"train/{train[3]}", f"val/{val[2]}"]]
    assert kinds["same file"] == [[f"train/{train[5]}", f"train/{train[6]}"]]
    assert kinds["look alike in two splits"] == [[f"train/{train[8]}", f"val/{val[4]}"]]
    assert [item["image"] for item in kinds["box given twice"]] == [train[0]]
    assert kinds["unused classes"] == ["never"] and kinds["missing classes"] == ["circle"]
    log = (tmp_path / "fixed" / "changes.txt").read_text()
    for words in (train[3], train[6], train[8], "10000", "never"):
        assert words in log
    check(tmp_path / "fixed", "--json", tmp_path / "again.json", "--image-size", 64)
    again = {
        each["kind"]
        for each in json.loads((tmp_path / "again.json").read_text())["findings"]
        if each["severity"] != "note"
    }
    assert again == {"missing classes"}  # which no copy can mend
    assert len(list((tmp_path / "fixed" / "train").iterdir())) == 21


def test_the_copy_of_the_dirty_set_is_clean(check, tmp_path):
    dirty = ROOT / "tests" / "data" / "dirty" / "annotations" / "instances.json"
    assert check(dirty, "--fix", tmp_path / "fixed") == 2
    assert check(dirty, "--on-error", "drop") == 1
    assert check(tmp_path / "fixed") == 0
    assert check(dirty, "--fix", tmp_path / "fixed") == 2  # not empty any more
    assert (tmp_path / "fixed" / "instances" / "png_bytes.png").is_file()  # the ending of its content


def test_a_class_of_crowds_alone_stays_in_the_copy(clean, check, tmp_path):
    shutil.copytree(clean, tmp_path / "d")
    for split in ("train", "val"):
        file = tmp_path / "d" / "annotations" / f"{split}.json"
        document = json.loads(file.read_text())
        document["categories"].append({"id": 99, "name": "crowd"})
        document["annotations"][0] |= {"category_id": 99, "iscrowd": 1}
        file.write_text(json.dumps(document))
    assert check(tmp_path / "d", "--fix", tmp_path / "fixed", "--image-size", 64) == 1
    fixed = json.loads((tmp_path / "fixed" / "annotations" / "train.json").read_text())
    assert fixed["categories"][-1]["name"] == "crowd" and fixed["annotations"][0]["category_id"] == 99


def test_headers_alone_decode_nothing(clean, check, tmp_path, capsys):
    assert check(clean, "--check-images", "header", "--image-size", 64) == 0
    assert "not compared with each other" in capsys.readouterr().out and not (tmp_path / "cache" / "looks").exists()
    assert check(clean, "--image-size", 64) == 0
    assert "not compared" not in capsys.readouterr().out and (tmp_path / "cache" / "looks").exists()


def test_splits_with_other_classes_are_an_error(clean, check, tmp_path):
    folder = tmp_path / "d"
    shutil.copytree(clean, folder)
    document = json.loads((folder / "annotations" / "val.json").read_text())
    document["categories"][0]["name"] = "ring"
    (folder / "annotations" / "val.json").write_text(json.dumps(document))
    assert check(folder) == 2


def test_pictures(clean, check, tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text("data: {image_size: 64, mosaic: 0.5, photometric: true, augment: [RandomVerticalFlip]}\n")
    assert check(clean, "--augment", config) == 2  # which script's defaults hold is not known
    assert "--script train_detr" in capsys.readouterr().err
    options = ("--image-size", 64, "--anchors", "--script", "train_yolov3")
    assert check(clean, "--pictures", tmp_path / "p", "--augment", config, *options) == 0
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert {"positions.png", "sizes.png", "aspect_ratios.png", "augmented.jpg"} < names
    assert sum(name.startswith("samples_") for name in names) == 4
    assert check(clean, "--augment", tmp_path / "none.yaml") == 2


def test_a_settings_file_is_completed_by_its_own_script(check, tmp_path):
    import check_data

    for name in ("yolov3", "ssd"):
        settings = check_data.data_settings(ROOT / "configs" / name / "own_data.yaml")
        assert settings.recipe == name and settings.multi_scale_pixels == (name == "ssd")
    (tmp_path / "config.yaml").write_text("data: {recipe: ssd, image_size: 32}")  # as a run writes it
    assert check_data.data_settings(tmp_path / "config.yaml").recipe == "ssd"


@pytest.mark.skipif(not BCCD.is_dir(), reason="no BCCD data: set DETECTION_TOOLKIT_BCCD to its folder")
def test_bccd(check, tmp_path):
    assert check(BCCD, "--json", tmp_path / "r.json", "--fix", tmp_path / "fixed") == 1
    kinds = {}
    for each in json.loads((tmp_path / "r.json").read_text())["findings"]:
        kinds.setdefault(each["kind"], []).extend(each["items"])
    assert kinds["look alike in two splits"] == [["train/BloodImage_00038.jpg", "val/BloodImage_00037.jpg"]]
    assert sorted(item["image"][-7:-4] for item in kinds["box given twice"]) == [
        "020",
        "100",
        "104",
        "251",
        "284",
        "331",
        "403",
    ]
    assert check(tmp_path / "fixed") == 0


# ---- images that look alike


def looks(images):
    digests = [hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest() for image in images]
    seen = [near_duplicates.thumbnail_of(torch.from_numpy(image).permute(2, 0, 1)) for image in images]
    return ImageSignatures(np.array(digests, "S32"), np.stack(seen))


SCENES = [draw_scene(0, "train", number, 96)[0] for number in range(40)]


def changed(image, seed):
    """As a video's next frame: shifted by a pixel, another brightness, noise."""
    rng = np.random.default_rng(seed)
    moved = np.roll(image, rng.integers(-1, 2, 2), (0, 1)).astype(np.float32)
    return (moved * rng.uniform(0.9, 1.1) + rng.normal(0, 3, image.shape)).clip(0, 255).astype(np.uint8)


def test_frames_of_a_moment_look_alike_and_other_scenes_do_not():
    images = [*SCENES, *(changed(image, number) for number, image in enumerate(SCENES))]
    found = alike_pairs(looks(images))
    assert set(found) <= {(number, number + 40) for number in range(40)} and len(found) >= 38


def test_many_images_are_compared_by_parts(monkeypatch):
    images = [*SCENES, *(changed(image, number) for number, image in enumerate(SCENES))]
    monkeypatch.setattr(near_duplicates, "ALL_PAIRS", 0)
    found = alike_pairs(looks(images))
    assert set(found) <= {(number, number + 40) for number in range(40)} and len(found) >= 36


@settings(deadline=None, max_examples=30)
@given(st.floats(0.05, 0.9), st.permutations(range(40)), st.integers(5, 39))
def test_held_out_images_stay_when_others_are_added(share, order, fewer):
    every = looks(SCENES)
    chosen = dict(zip(range(40), held_out(every, share).tolist(), strict=True))
    some = sorted(order[:fewer])
    part = held_out(ImageSignatures(every.digests[some], every.thumbnails[some]), share).tolist()
    differ = sum(chosen[index] != held for index, held in zip(some, part, strict=True))
    assert differ <= 1  # the one that is moved where nothing else would be held out, or nothing left
    assert 0 < sum(part) < len(part)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)).filter(lambda pair: pair[0] < pair[1]), max_size=30))
def test_groups_are_the_connected_parts(pairs):
    member = groups(20, pairs)
    assert all(member[i] == member[j] for i, j in pairs)
    assert len(set(member.tolist())) >= 20 - len(pairs) and all(member <= np.arange(20))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)).filter(lambda pair: pair[0] < pair[1]), min_size=1),
       st.lists(st.integers(0, 2), min_size=15, max_size=15))  # fmt: skip
def test_fewer_pairs_say_as_much(pairs, splits):
    kept = near_duplicates._Pairs(np.array(splits))
    kept.add(*np.array(pairs).T)
    kept._thin()
    fewer = [tuple(pair) for pair in kept.pairs().tolist()]
    assert set(fewer) <= set(pairs) and (groups(15, fewer) == groups(15, pairs)).all()
    assert not kept.adds(*np.array(pairs).T).any()

    def seen(of):
        return {(i, splits[j]) for pair in of for i, j in (pair, pair[::-1])}

    assert seen(fewer) == seen(pairs)


@pytest.mark.parametrize("all_pairs", [0, 10_000])
def test_a_standing_camera_is_as_many_pairs_as_pictures(monkeypatch, all_pairs):
    monkeypatch.setattr(near_duplicates, "MOST_PAIRS", 10_000)
    monkeypatch.setattr(near_duplicates, "ALL_PAIRS", all_pairs)
    thumbnails = np.repeat(np.random.default_rng(0).integers(9, 240, (1, 16, 16), np.uint8), 600, axis=0)
    thumbnails[np.arange(600), np.arange(600) % 16, 3] += 1
    digests = np.array([f"{n:03}" for n in range(600)], "S32")
    found = alike_pairs(ImageSignatures(digests, thumbnails), np.arange(600) % 2)
    assert {i for pair in found for i in pair} == {*range(600)} and len(found) < 3000
    crossing = {i for pair in found for i in pair if sum(pair) % 2}
    assert crossing == {*range(600)} and not groups(600, found).any()


def test_thousands_of_copies_are_as_many_pairs():
    copies = ImageSignatures(np.array([b"one"] * 3000 + [b"two"], "S32"), np.zeros((3001, 16, 16), np.uint8))
    assert alike_pairs(copies) == [(0, other) for other in range(1, 3001)]
    pairs = list(inspection._copies([0, 1, 2, 3, 4], ["train", "train", "val", "val", "test"]))
    assert pairs == [(0, 1), (2, 3), (0, 2), (0, 4), (2, 4)]


def test_what_looks_alike_is_held_out_together():
    images = [*SCENES, *(changed(image, number) for number, image in enumerate(SCENES))]
    held = held_out(looks(images), 0.3)
    assert all(held[i] == held[j] for i, j in alike_pairs(looks(images))) and 0.1 < held.mean() < 0.5


def test_large_groups_are_not_held_out_more_often_than_small_ones():
    """20 scenes of 30 frames each: an unlucky scene is 5 % of the images, not all scenes."""
    rng = np.random.default_rng(0)
    thumbnails = np.repeat(rng.integers(9, 240, (20, 16, 16), np.uint8), 30, axis=0)
    digests = [hashlib.blake2b(b"%d" % number, digest_size=16).hexdigest() for number in range(600)]
    frames = ImageSignatures(np.array(digests, "S32"), thumbnails)
    assert len(set(groups(600, alike_pairs(frames)).tolist())) == 20
    for share in (0.05, 0.1, 0.2, 0.3):
        assert abs(held_out(frames, share).mean() - share) <= 0.15
    assert "warning" not in share_that_came_out(45, 200, 0.2)
    assert "75 of these 100 images (75%, asked for: 20%)" in share_that_came_out(75, 100, 0.2)
    assert "\nwarning: " in share_that_came_out(75, 100, 0.2) and "\nwarning: " in share_that_came_out(5, 100, 0.2)


def test_signs_say_which_cells_are_brighter_than_the_next_in_their_row():
    rising = np.repeat(np.arange(8, dtype=np.uint8), 2)  # the last cell of a row is followed by its first
    thumbnails = np.stack([np.tile(rising, (16, 1)), np.tile(rising[:, None], (1, 16))])
    bits = np.unpackbits(near_duplicates._signs(thumbnails).view(np.uint8)).reshape(2, 8, 8)
    assert not bits[0, :, :7].any() and bits[0, :, 7].all() and not bits[1].any()


def test_a_share_of_training_data_is_validation_data(clean, tmp_path):
    reading = {"path": clean, "cache_dir": tmp_path / "cache"}
    said = []
    train, val = open_splits("train", "0.25", tmp_path, say=said.append, **reading)
    whole = open_dataset("train", **reading)
    assert len(train) + len(val) == 24 and len(val) and any("held out" in text for text in said)
    assert not set(train.image_ids()) & set(val.image_ids()) and set(train.image_ids()) < set(whole.image_ids())
    again = open_split("0.25", say=said.append, part_of="train", **reading)
    assert again.image_ids().tolist() == val.image_ids().tolist() and again.fingerprint == val.fingerprint
    for table in (train, val):  # rows are whole
        by_id = {whole.row(i)["image_id"]: whole.row(i) for i in range(24)}
        for index in range(len(table)):
            row = table.row(index)
            assert row["objects"]["bbox"].tolist() == by_id[row["image_id"]]["objects"]["bbox"].tolist()
            assert row["relations"]["subject"].tolist() == by_id[row["image_id"]]["relations"]["subject"].tolist()
    assert hold_out(whole, 0.25, tmp_path / "cache")[0].fingerprint == train.fingerprint
    assert share_of("25%") == share_of(" 25 % ") == share_of(0.25) == 0.25
    for wrong in ("1.5", "0", "-0.1", "nan", "150%", "0%"):
        with pytest.raises(BadInput, match=r"data\.val"):
            share_of(wrong)
    assert share_of("val") is None


def test_images_of_one_moment_cannot_be_split(tmp_path):
    same = looks([changed(SCENES[0], number) for number in range(6)])
    with pytest.raises(BadInput, match="look alike"):
        held_out(same, 0.2)


def test_looks_are_cached_and_notice_changed_files(clean, tmp_path):
    table = open_dataset("val", path=clean, cache_dir=tmp_path)
    first = signatures_of(table, tmp_path)
    assert len(list((tmp_path / "looks").iterdir())) == 1
    assert np.array_equal(signatures_of(table, tmp_path).thumbnails, first.thumbnails)
    assert len(list((tmp_path / "looks").iterdir())) == 1


@pytest.mark.slow
def test_comparing_images_keeps_none_of_them():
    """4,000 images take 110 MB decoded; what is kept of one lay among them once, so that none was given back."""
    code = """
import io
import numpy as np
from PIL import Image
from toolkit.data.near_duplicates import _digest_and_thumbnail
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
def image(i):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(i).integers(0, 255, (96, 96, 3), np.uint8)).save(file, "JPEG", quality=10)
    return file.getvalue()
kept = [_digest_and_thumbnail(image(i)) for i in range(200)]
before = resident()
kept += [_digest_and_thumbnail(image(i)) for i in range(200, 4200)]
print(resident() - before)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 30e6


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 9), st.integers(0, 1)), max_size=7))
def test_boxes_given_twice(items):
    boxes = np.array([(x, y, x + s, y + s) for x, y, s, _ in items], np.float32).reshape(-1, 4)
    labels = np.array([label for *_, label in items], np.int64)
    pairs = near_boxes(boxes, labels, np.ones(len(boxes), bool))
    gone = [second for _, second in pairs]
    assert len(gone) == len(set(gone)) and not set(gone) & {first for first, _ in pairs}
    left = [item for index, item in enumerate(items) if index not in gone]
    assert len(left) == len(set(items))  # with whole numbers of at most 9, an IoU above 0.9 is the same box
