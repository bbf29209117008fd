"""check_data.py on planted faults, the clean copy, and the split that keeps images that look alike together."""

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from documents import BCCD, DIRTY, needs_bccd
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance
from places import ROOT

from scripts import check_data
from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.splits import Fold, open_split, open_splits, share_of, share_that_came_out
from toolkit.data.table_cache import write_table
from toolkit.tools.doctor import inspection, near_duplicates
from toolkit.tools.doctor.inspection import near_boxes
from toolkit.tools.doctor.near_duplicates import (
    ImageSignatures,
    alike_pairs,
    folds_of,
    groups,
    held_out,
    hold_out,
    signatures_of,
)
from toolkit.tools.doctor.pictures import ticks_of
from toolkit.tools.doctor.program import data_settings
from toolkit.tools.doctor.tile_advice import tile_advice
from toolkit.tools.shapes import draw_scene, make_shapes


@pytest.fixture
def check(monkeypatch, tmp_path):
    """`check(*arguments)` -> exit code of scripts/check_data.py."""
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(ROOT / "scripts")  # where it finds the other scripts
    return lambda *arguments: check_data.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean") / "d"
    make_shapes(folder, 24, 8, 64)
    return folder


def edit(folder, split, change):
    """`change(document)` for the annotation file of a split."""
    file = folder / "annotations" / f"{split}.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def findings(file, but_notes=False):
    """{kind: items} of a report."""
    listed = json.loads(file.read_text())["findings"]
    return {each["kind"]: each["items"] for each in listed if not but_notes or each["severity"] != "note"}


def planted(clean, folder):
    """A copy with leakage, duplicates, a box given twice, an unused class and a class that validation lacks."""
    shutil.copytree(clean, folder)
    train, val = (sorted((folder / split).iterdir()) for split in ("train", "val"))
    shutil.copy(val[2], train[3])
    shutil.copy(train[5], train[6])
    ImageEnhance.Brightness(Image.open(val[4])).enhance(1.1).save(train[8], quality=60)

    def box_twice(document):
        box = next(a for a in document["annotations"] if a["image_id"] == 1)
        x, y, w, h = box["bbox"]
        document["annotations"].append({**box, "id": 10**6, "bbox": [x, y, max(1, w - 0.5), h]})
        document["categories"].append({"id": 99, "name": "never"})

    def without_circles(document):
        document["categories"].append({"id": 99, "name": "never"})
        document["annotations"] = [a for a in document["annotations"] if a["category_id"] != 1]
        document["rel_annotations"] = []

    edit(folder, "train", box_twice)
    edit(folder, "val", without_circles)
    return folder, [path.name for path in train], [path.name for path in val]


def test_a_clean_set_has_exit_code_0_and_headers_alone_decode_nothing(clean, check, tmp_path, capsys):
    assert check(clean, "--check-images", "header", "--image-size", 64) == 0
    assert "not compared with each other" in capsys.readouterr().out and not (tmp_path / "cache" / "looks").exists()
    assert check(clean, "--json", tmp_path / "r.json", "--image-size", 64) == 0
    report, printed = json.loads((tmp_path / "r.json").read_text()), capsys.readouterr().out
    assert report["exit_code"] == 0 and report["splits"]["train"]["images"] == 24
    assert "COCO, splits train, val" in printed and "not compared" not in printed
    shutil.copytree(clean, tmp_path / "d")
    edit(tmp_path / "d", "val", lambda document: document["categories"][0].update(name="ring"))
    assert check(tmp_path / "d") == 2, "splits with other classes are an error"


def test_tiles_are_advised_where_they_make_tiny_objects_larger(clean, check, tmp_path, capsys):
    check(clean, "--image-size", 32, "--check-images", "header")
    said = re.search(r"train: (\d+)% of the objects are smaller than 8 px .* of 32 x 32 px", capsys.readouterr().out)
    objects = open_dataset("train", path=clean, cache_dir=tmp_path / "cache").boxes()
    share = np.mean(np.sqrt((objects.xywh[:, 2:] / 2).prod(1)) < 8)
    assert (said is not None) == (share >= 0.1)
    many = Boxes.found([3], np.array([[0, 0, 40, 40], [50, 50, 62, 62], [90, 90, 102, 102]]), np.zeros(3), np.zeros(3))
    sizes = np.array([[1500, 2000]])
    sentence = tile_advice("train", many, sizes, (640, 640))
    assert "train: 67% of the objects" in sentence and "0% in tiles" in sentence and "--data.tile 640" in sentence
    assert "longer than the overlap" not in sentence
    assert "33% are longer than the overlap" in tile_advice("train", many, sizes, (180, 180))
    assert tile_advice("train", many, np.array([[640, 640]]), (640, 640)) is None, "tiles would be the pictures"
    assert tile_advice("train", many[np.arange(1)], sizes, (640, 640)) is None
    assert tile_advice("train", many[np.arange(0)], sizes, (640, 640)) is None


def coco_folder(folder, boxes, size_wh=(100, 80), masks=False):
    """A training split of COCO with one image for each list of boxes; masks: triangles in them."""
    images, annotations = [], []
    for number, of_image in enumerate(boxes):
        pixels = np.random.default_rng(number).integers(0, 255, (*size_wh[::-1], 3), np.uint8)
        (folder / "train").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "train" / f"{number}.jpg")
        images.append({"id": number, "file_name": f"{number}.jpg", "width": size_wh[0], "height": size_wh[1]})
        for x, y, w, h in of_image:
            one = {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "bbox": [x, y, w, h]}
            one |= {"area": w * h / 2, "segmentation": [[x, y, x + w, y, x, y + h]]} if masks else {}
            annotations.append(one)
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    (folder / "train" / "_annotations.coco.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("masks", [False, True])
def test_the_printed_command_has_the_tiles_and_masks_that_pay_at_its_own_size(check, tmp_path, capsys, masks):
    rng = np.random.default_rng(0)
    small = [[[*map(float, rng.integers(0, 900, 2)), 12, 12] for _ in range(4)] for _ in range(4)]
    assert check(coco_folder(tmp_path / "d", small, (1000, 1000), masks), "--check-images", "header") == 0
    said = capsys.readouterr().out
    assert "16 of 16 boxes are less than 4 px wide or high at an input size of 256 px" in said
    command = said.strip().splitlines()[-1]
    assert ("--model.masks true" in command, "--data.tile 256" in command) == (masks, not masks)
    assert ("masks are not trained on tiles: leave model.masks out for data.tile 256" in said) == masks
    assert said.index("usable images") < said.index("class ")


def test_masks_that_are_the_boxes_are_not_trained(check, tmp_path, capsys):
    folder = coco_folder(tmp_path / "d", [[[10, 10, 40, 40]]] * 4, masks=True)
    square = [[10, 10, 50, 10, 50, 50, 10, 50]]
    file = folder / "train" / "_annotations.coco.json"
    document = json.loads(file.read_text())
    for one in document["annotations"]:
        one |= {"segmentation": square, "area": 1600}
    file.write_text(json.dumps(document))
    check(folder, "--check-images", "header")
    assert "--model.masks" not in capsys.readouterr().out


def test_many_problems_of_a_kind_are_one_line_that_begins_with_the_largest(check, tmp_path, capsys):
    boxes = [[[70, 10, 30.4 + 9 * (number == 7), 40]] for number in range(20)]
    folder = coco_folder(tmp_path / "d", boxes)
    for number in range(1, 20):
        shutil.copy(folder / "train" / "0.jpg", folder / "train" / f"{number}.jpg")
    assert check(folder, "--json", tmp_path / "r.json") == 1
    said = capsys.readouterr().out
    (line,) = (line for line in said.splitlines() if "exceeds the image" in line)
    assert line.startswith("  20 of one kind (--json lists all), the largest: 7.jpg (image 7, annotation 8): bbox ")
    assert line.count("exceeds the image") == 3
    assert said.count(" = all/") + said.count(" = train/") == 3 and "and 16 more; --json lists all" in said
    findings = json.loads((tmp_path / "r.json").read_text())["findings"]
    assert max(len(finding["items"]) for finding in findings if finding["kind"] == "record") == 20


def test_planted_faults_are_all_found_and_mended(clean, check, tmp_path):
    folder, train, val = planted(clean, tmp_path / "planted")
    assert check(folder, "--json", tmp_path / "r.json", "--fix", tmp_path / "fixed", "--image-size", 64) == 1
    kinds = findings(tmp_path / "r.json")
    assert kinds["same file in two splits"] == [[f"train/{train[3]}", f"val/{val[2]}"]]
    assert kinds["same file"] == [[f"train/{train[5]}", f"train/{train[6]}"]]
    assert kinds["look alike in two splits"] == [[f"train/{train[8]}", f"val/{val[4]}"]]
    assert [item["image"] for item in kinds["box given twice"]] == [train[0]]
    assert kinds["unused classes"] == ["never"] and kinds["missing classes"] == ["circle"]
    log = (tmp_path / "fixed" / "changes.txt").read_text()
    assert all(words in log for words in (train[3], train[6], train[8], "10000", "never"))
    check(tmp_path / "fixed", "--json", tmp_path / "again.json", "--image-size", 64)
    assert [*findings(tmp_path / "again.json", but_notes=True)] == ["missing classes"]  # which no copy can mend
    assert len(list((tmp_path / "fixed" / "train").iterdir())) == 21


def test_the_copy_of_the_dirty_set_is_clean(check, tmp_path, capsys):
    dirty = DIRTY / "annotations" / "instances.json"
    assert check(dirty, "--fix", tmp_path / "fixed") == 2
    printed = capsys.readouterr().out
    assert "ERRORS (records that cannot be used): 18" in printed and "19 usable images" in printed
    assert check(dirty, "--on-error", "drop") == 1
    assert check(tmp_path / "fixed") == 0
    assert check(dirty, "--fix", tmp_path / "fixed") == 2  # not empty any more
    assert (tmp_path / "fixed" / "instances" / "png_bytes.png").is_file()  # the ending of its content


def test_a_class_of_crowds_alone_stays_in_the_copy(clean, check, tmp_path):
    def add_crowd(document):
        document["categories"].append({"id": 99, "name": "crowd"})
        document["annotations"][0] |= {"category_id": 99, "iscrowd": 1}

    shutil.copytree(clean, tmp_path / "d")
    for split in ("train", "val"):
        edit(tmp_path / "d", split, add_crowd)
    assert check(tmp_path / "d", "--fix", tmp_path / "fixed", "--image-size", 64) == 1
    fixed = json.loads((tmp_path / "fixed" / "annotations" / "train.json").read_text())
    assert fixed["categories"][-1]["name"] == "crowd" and fixed["annotations"][0]["category_id"] == 99


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


@given(st.floats(1e-3, 1e4), st.floats(1.2, 1e5))
def test_ticks_of_sizes_do_not_overlap(low, ratio):
    ticks = ticks_of(low, low * ratio)
    places = [math.log(tick / low) / math.log(ratio) for tick in ticks]
    assert len(ticks) >= 3 and all(0 <= place <= 1 for place in places)
    assert min(after - before for before, after in zip(places, places[1:], strict=False)) > 0.08
    assert ticks_of(low, low) == [float(f"{low:.3g}")]


def test_the_ticks_of_sizes_are_plain_numbers():
    assert ticks_of(100, 400) == [100, 150, 200, 300, 400] and ticks_of(0.2, 5) == [0.2, 0.3, 0.5, 0.7, 1, 2, 3, 5]
    assert ticks_of(3, 700) == [5, 10, 20, 50, 100, 200, 500]


def test_a_settings_file_is_completed_by_its_own_script(check, tmp_path):
    for name in ("yolov3", "ssd"):
        settings = data_settings(ROOT / "configs" / name / "own_data.yaml")
        assert settings.recipe == name and settings.multi_scale_pixels == (name == "ssd")
    (tmp_path / "config.yaml").write_text("data: {recipe: ssd, image_size: 32}")  # as a run writes it
    assert data_settings(tmp_path / "config.yaml").recipe == "ssd"


@needs_bccd
def test_bccd(check, tmp_path):
    assert check(BCCD, "--json", tmp_path / "r.json", "--fix", tmp_path / "fixed") == 1
    listed = json.loads((tmp_path / "r.json").read_text())["findings"]
    twice = [item["image"][-7:-4] for each in listed if each["kind"] == "box given twice" for item in each["items"]]
    assert sorted(twice) == "020 100 104 251 284 331 403".split()
    alike = findings(tmp_path / "r.json")["look alike in two splits"]
    assert alike == [["train/BloodImage_00038.jpg", "val/BloodImage_00037.jpg"]]
    assert check(tmp_path / "fixed") == 0


def signatures(images):
    thumbnails = [near_duplicates.thumbnail_of(torch.from_numpy(image).permute(2, 0, 1)) for image in images]
    return signed(np.stack(thumbnails))


def signed(thumbnails):
    contents = (thumbnail.tobytes() + b"%d" % number for number, thumbnail in enumerate(thumbnails))
    digests = [hashlib.blake2b(content, digest_size=16).hexdigest() for content in contents]
    return ImageSignatures(np.array(digests, "S32"), thumbnails)


def changed(image, seed):
    """As a video's next frame: shifted by a pixel, another brightness, noise."""
    rng = np.random.default_rng(seed)
    moved = np.roll(image, rng.integers(-1, 2, 2), (0, 1)).astype(np.float32)
    return (moved * rng.uniform(0.9, 1.1) + rng.normal(0, 3, image.shape)).clip(0, 255).astype(np.uint8)


SCENES = [draw_scene(0, "train", number, 96)[0] for number in range(40)]
FRAMES = signatures([*SCENES, *(changed(image, number) for number, image in enumerate(SCENES))])


@pytest.mark.parametrize(("all_pairs", "least"), [(near_duplicates.MAX_IMAGES_FOR_ALL_PAIRS, 38), (0, 36)])
def test_frames_of_a_moment_look_alike_and_other_scenes_do_not(monkeypatch, all_pairs, least):
    """Also many images, which are compared by parts; what looks alike is held out together."""
    monkeypatch.setattr(near_duplicates, "MAX_IMAGES_FOR_ALL_PAIRS", all_pairs)
    found, held = alike_pairs(FRAMES), held_out(FRAMES, 0.3)
    assert set(found) <= {(number, number + 40) for number in range(40)} and len(found) >= least
    assert all(held[i] == held[j] for i, j in found) and 0.1 < held.mean() < 0.5
    with pytest.raises(BadInput, match="look alike"):  # images of one moment cannot be split
        held_out(signatures([changed(SCENES[0], number) for number in range(6)]), 0.2)


@settings(max_examples=30)
@given(st.floats(0.05, 0.9), st.permutations(range(40)), st.integers(5, 39))
def test_held_out_images_stay_when_others_are_added(share, order, fewer):
    every = ImageSignatures(FRAMES.digests[:40], FRAMES.thumbnails[:40])
    chosen = dict(zip(range(40), held_out(every, share).tolist(), strict=True))
    some = sorted(order[:fewer])
    part = held_out(ImageSignatures(every.digests[some], every.thumbnails[some]), share).tolist()
    changed_over = {chosen[index] for index, held in zip(some, part, strict=True) if chosen[index] != held}
    assert len(changed_over) <= 1, "from one side alone: the order in which images are taken is the same"
    assert 0 < sum(part) < len(part)
    assert abs(sum(part) - share * len(part)) <= max(0.5, 0.1 * share * len(part), 1 - share * len(part))


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_are_even_and_keep_what_looks_alike_together(folds):
    fold = folds_of(FRAMES, folds)
    assert all(fold[i] == fold[j] for i, j in alike_pairs(FRAMES))
    sizes = np.bincount(fold, minlength=folds)
    assert sizes.sum() == len(FRAMES) and sizes.min() >= len(FRAMES) / folds - 2 and sizes.max() - sizes.min() <= 4
    with pytest.raises(BadInput, match="fold 1 would be empty|would be empty"):
        folds_of(FRAMES, 81)


def ordered_pairs(below):
    """Two different numbers, the smaller one first."""
    return st.integers(1, below - 1).flatmap(lambda j: st.tuples(st.integers(0, j - 1), st.just(j)))


@settings(max_examples=30)
@given(st.lists(ordered_pairs(20), max_size=30))
def test_groups_are_the_connected_parts(pairs):
    member = groups(20, pairs)
    assert all(member[i] == member[j] for i, j in pairs)
    assert len(set(member.tolist())) >= 20 - len(pairs) and all(member <= np.arange(20))


PAIRS = st.lists(ordered_pairs(15), min_size=1)


@given(PAIRS, PAIRS, st.lists(st.integers(0, 2), min_size=15, max_size=15))
def test_fewer_pairs_say_as_much(pairs, more, splits):
    """Of each image one partner in each split, and the same groups; also where others are added afterwards."""

    def partners(of):
        return {(i, splits[j]) for pair in of for i, j in (pair, pair[::-1])}

    kept, added = near_duplicates._Pairs(np.array(splits)), []
    for new in (pairs, more):
        added += new
        kept.add(*np.array(new).T)
        kept._thin()
        fewer = [tuple(pair) for pair in kept.pairs().tolist()]
        assert set(fewer) <= set(added) and (groups(15, fewer) == groups(15, added)).all()
        assert partners(fewer) == partners(added) and len(set(fewer)) == len(fewer) <= len(partners(added)) + 14
        group, every = groups(15, added), [(i, j) for i in range(15) for j in range(i)]
        news = [group[i] != group[j] or not partners([(i, j)]) <= partners(added) for i, j in every]
        assert kept.adds(*np.array(every).T).tolist() == news


@pytest.mark.parametrize("all_pairs", [0, 10_000])
def test_a_standing_camera_is_as_many_pairs_as_pictures(monkeypatch, all_pairs):
    monkeypatch.setattr(near_duplicates, "MAX_PAIRS", 10_000)
    monkeypatch.setattr(near_duplicates, "MAX_IMAGES_FOR_ALL_PAIRS", all_pairs)
    thumbnails = np.repeat(np.random.default_rng(0).integers(9, 240, (1, 16, 16), np.uint8), 600, axis=0)
    thumbnails[np.arange(600), np.arange(600) % 16, 3] += 1
    found = alike_pairs(signed(thumbnails), np.arange(600) % 2)
    assert {i for pair in found for i in pair} == {*range(600)} and len(found) < 3000
    crossing = {i for pair in found for i in pair if sum(pair) % 2}
    assert crossing == {*range(600)} and not groups(600, found).any()


def test_thousands_of_copies_are_as_many_pairs():
    copies = ImageSignatures(np.array([b"one"] * 3000 + [b"two"], "S32"), np.zeros((3001, 16, 16), np.uint8))
    assert alike_pairs(copies) == [(0, other) for other in range(1, 3001)]
    pairs = list(inspection._copies([0, 1, 2, 3, 4], ["train", "train", "val", "val", "test"]))
    assert pairs == [(0, 1), (2, 3), (0, 2), (0, 4), (2, 4)]


def test_large_groups_are_not_held_out_more_often_than_small_ones():
    """20 scenes of 30 frames each: an unlucky scene is 5 % of the images, not all scenes."""
    rng = np.random.default_rng(0)
    frames = signed(np.repeat(rng.integers(9, 240, (20, 16, 16), np.uint8), 30, axis=0))
    assert len(set(groups(600, alike_pairs(frames)).tolist())) == 20
    for share in (0.05, 0.1, 0.2, 0.3):
        assert held_out(frames, share).mean() == pytest.approx(share), "20 scenes can be divided like this"
    assert "warning" not in share_that_came_out(45, 200, 0.2)
    assert "75 of these 100 images (75%, asked for: 20%)" in share_that_came_out(75, 100, 0.2)
    assert "\nwarning: " in share_that_came_out(75, 100, 0.2) and "\nwarning: " in share_that_came_out(5, 100, 0.2)


@pytest.mark.parametrize(("counts", "share", "least", "most"), [
    ([312, *[1] * 208], 0.2, 0.18, 0.22), ([100, 50, 50], 0.2, 0.25, 0.25), ([90, 10], 0.3, 0.1, 0.1),
    ([50, 50], 0.2, 0.5, 0.5), ([1, 2, 3, 4, 90], 0.05, 0.04, 0.06),
])  # fmt: skip
def test_a_large_group_does_not_make_a_lottery_of_the_share(counts, share, least, most):
    """A standing camera is one group: where it stands in the order, a tenth of the share could be held out."""
    for seed in range(5):  # the order of the groups follows their bytes
        rng = np.random.default_rng(seed)
        frames = signed(np.repeat(rng.integers(9, 240, (len(counts), 16, 16), np.uint8), counts, axis=0))
        assert len(set(groups(len(frames), alike_pairs(frames)).tolist())) == len(counts)
        assert least <= held_out(frames, share).mean() <= most


def test_images_look_alike_when_ten_signs_differ_and_not_when_eleven_do(monkeypatch):
    """A sign says whether a cell is brighter than the next in its row, the last than the first."""
    rising = np.repeat(np.arange(8, dtype=np.uint8), 2)
    thumbnails = np.stack([np.tile(rising, (16, 1)), np.tile(rising[:, None], (1, 16))])
    bits = np.unpackbits(near_duplicates._signs(thumbnails).view(np.uint8)).reshape(2, 8, 8)
    assert not bits[0, :, :7].any() and bits[0, :, 7].all() and not bits[1].any()
    cells = np.repeat(20 * np.arange(8)[None, :, None], 8, axis=2).repeat(3, axis=0)  # 3 images, the same in each row
    for image, brighter in ((1, 10), (2, 11)):
        cells[image].reshape(-1)[: 2 * brighter : 2] += 1
    images = signed(cells.repeat(2, axis=1).repeat(2, axis=2).astype(np.uint8))
    for all_pairs in (near_duplicates.MAX_IMAGES_FOR_ALL_PAIRS, 0):
        monkeypatch.setattr(near_duplicates, "MAX_IMAGES_FOR_ALL_PAIRS", all_pairs)
        assert alike_pairs(images) == [(0, 1), (1, 2)]


def test_a_share_of_training_data_is_validation_data(clean, tmp_path):
    reading, said = {"path": clean, "cache_dir": tmp_path / "cache"}, []
    train, val = open_splits("train", "0.25", tmp_path, say=said.append, **reading)
    whole = open_dataset("train", **reading)
    assert len(train) + len(val) == 24 and len(val) and any("held out" in text for text in said)
    by_id = {whole.row(i)["image_id"]: whole.row(i) for i in range(24)}
    assert {*train.image_ids()} | {*val.image_ids()} == by_id.keys()
    for table in (train, val):  # rows are whole
        for row in map(table.row, range(len(table))):
            for group in ("objects", "relations"):
                for key, values in by_id[row["image_id"]][group].items():
                    assert np.array_equal(row[group][key], values), key
    again = open_split("0.25", say=said.append, part_of="train", **reading)
    assert again.image_ids().tolist() == val.image_ids().tolist() and again.fingerprint == val.fingerprint
    assert hold_out(whole, 0.25, tmp_path / "cache")[0].fingerprint == train.fingerprint
    # A run of an earlier version, which wrote both parts, goes on with their fingerprints.
    file = tmp_path / "cache" / "tables" / f"{whole.fingerprint}-0.25-rest-{near_duplicates.CACHE_VERSION}.json"
    written = write_table(train.image_rows(), train.boxes(), cache_file=file, categories=train.categories)
    rest, held = hold_out(whole, 0.25, tmp_path / "cache")
    assert rest.fingerprint == written.fingerprint != train.fingerprint and held.fingerprint == val.fingerprint
    assert share_of("25%") == share_of(" 25 % ") == share_of(0.25) == 0.25 and share_of("val") is None
    assert share_of("2/5") == (2, 5) and share_of("annotations/5") is None
    held = [hold_out(whole, Fold(number, 3), tmp_path / "cache") for number in (1, 2, 3)]
    assert sorted(key for _, part in held for key in part.image_ids()) == sorted(whole.image_ids())
    assert all(len(rest) + len(part) == 24 for rest, part in held)
    for wrong in ("1.5", "0", "-0.1", "nan", "150%", "0%", "0/5", "6/5", "1/1"):
        with pytest.raises(BadInput, match=r"data\.val"):
            share_of(wrong)


def test_signatures_are_cached_and_notice_changed_files(clean, tmp_path):
    shutil.copytree(clean, tmp_path / "d")
    table = open_dataset("val", path=tmp_path / "d", cache_dir=tmp_path)
    first, again = (signatures_of(table, tmp_path) for _ in range(2))
    assert np.array_equal(first.thumbnails, again.thumbnails) and len(list((tmp_path / "looks").iterdir())) == 1
    Image.new("RGB", (64, 64)).save(tmp_path / "d" / "val" / table.file_name(0))
    assert not signatures_of(table, tmp_path).thumbnails[0].any() and len(list((tmp_path / "looks").iterdir())) == 2


@pytest.mark.slow
def test_comparing_images_keeps_none_of_them():
    """4,000 images take 110 MB decoded; what is kept of one lay among them once, so that none was given back."""
    code = """
import io
import numpy as np
from PIL import Image
from toolkit.tools.doctor.near_duplicates import _digest_and_thumbnail
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
