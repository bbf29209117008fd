"""Training and judging on tiles: killed and resumed, on two processes, evaluated again, and what is refused."""

import json

import pytest
from launching import EVALUATION, ROOT, SCRIPTS, assert_same_run, kill, rows, small_settings

PREDICT, EVALUATE = (ROOT / "scripts" / f"{name}.py" for name in ("predict", "evaluate"))
TILES = ("--data.tile", 40, "--data.tile_visible", 0.4, "--data.tile_empty", 0.5)


@pytest.fixture(scope="module")
def tiled(server, script, settings, once):
    """(arguments but the name, folder of an uninterrupted run of six steps on tiles of 40 x 40 px of 64 x 64 px)."""
    if script.name == "train_sgg":
        pytest.skip("data.tile refuses scene graphs, whose relations tiles cut apart")
    args = settings(*TILES, "--run.max_steps", 6, "--run.eval_every", 3, "--run.save_every", 2, "--run.epochs", 2,
                    "--data.workers", 2, "--run.resume", "latest", "--run.keep", 1, "--eval.pictures", 2)  # fmt: skip

    def make(folder):
        place = ["--run.output_dir", folder, "--run.name", "reference"]
        server.run(script, [*args, *place], whole=script == SCRIPTS[0]).ok()

    return args, once(f"tiles_{script.name}", make) / "reference"


@pytest.mark.every_script("slow")
def test_a_killed_run_on_tiles_goes_on_to_the_bit(server, script, tiled, tmp_path):
    args, reference = tiled
    args = [*args, "--run.output_dir", tmp_path]
    for fault in (kill(5), kill(1, EVALUATION)):
        assert server.run(script, args, 1, [fault]).code == -9
    resumed = server.run(script, args).ok()
    assert_same_run(resumed.folder, reference)
    said = "tiles of at most 40 x 40 px (height x width) of 18 pictures"
    assert said in resumed.text and "an epoch has" in resumed.text


@pytest.mark.slow
def test_a_killed_run_on_tiles_of_two_processes_goes_on_to_the_bit(server, script, tiled, tmp_path):
    args, _ = tiled
    place = ["--run.output_dir", tmp_path, "--data.batch_size_per_device", 2]
    reference = server.run(script, [*args, *place, "--run.name", "reference"], 2).ok().folder
    assert server.run(script, [*args, *place], 2, [kill(5)]).code == -9
    assert_same_run(server.run(script, [*args, *place], 2).ok().folder, reference)


def test_a_run_on_tiles_is_judged_again_as_it_was(server, tiled, data, tmp_path):
    _, reference = tiled
    trained = next(row for row in reversed(rows(reference)) if "val/bbox_AP" in row)
    again = server.run(EVALUATE, [reference / "checkpoints" / "latest", "--weights", "model"]).ok()
    assert "a tile (tile40x40" in again.text and "10 images" in again.text
    for name in ("bbox_AP", "bbox_AR100", "loss"):
        assert again.numbers[name] == trained[f"val/{name}"]
    saved = {}
    for name, more in {"as trained": [], "whole": ["--tile", 0], "smaller": ["--tile", 32, "--overlap", 0.1]}.items():
        ended = server.run(EVALUATE, [reference, "--save", tmp_path / "found.json", *more]).ok()
        saved[name] = (tmp_path / "found.json").read_bytes()
        assert ("ms an image" in ended.text) == (name == "whole")
    assert saved["as trained"] == (reference / "report" / "predictions.json").read_bytes()
    assert len(set(saved.values())) == 3
    picture = sorted((data / "val").iterdir())[0]
    counts = []
    for more in ([], ["--tile", 40], ["--tile", 0]):
        out = tmp_path / f"found{len(counts)}"
        server.run(PREDICT, [reference, picture, "--out", out, "--no-pictures", "--score-threshold", 0, *more]).ok()
        counts.append(json.loads((out / "predictions.json").read_text())["images"][0]["detections"])
    assert counts[0] == counts[1] != counts[2], "in the tiles of the run unless told otherwise"
    wrong = server.run(EVALUATE, [reference, "--tile", -3])
    assert wrong.code == 2 and "argument --tile: -3: expected" in wrong.text


def test_whole_pictures_of_several_sets_are_held_out_and_judged(server, script, settings, data, tmp_path):
    files = [str(data / "annotations" / f"{split}.json") for split in ("train", "val")]
    args = settings(*TILES, "--data.train", f"[{', '.join(files)}]", "--data.val", 0.25, "--data.shares", "[1, 1]",
                    "--data.format", "auto", "--run.max_steps", 2, "--run.output_dir", tmp_path)  # fmt: skip
    ended = server.run(script, args).ok()
    held = json.loads((ended.folder / "environment.json").read_text())["data"]
    assert held["train"]["images"] + held["val"]["images"] == 28
    assert held["train"]["tiles"] > held["train"]["images"]
    again = server.run(EVALUATE, [ended.folder, "--save", tmp_path / "found.json"]).ok()
    assert f"{held['val']['images']} images" in again.text
    ids = {each["image_id"] for each in json.loads((tmp_path / "found.json").read_text())}
    assert len(ids) == held["val"]["images"] and not any("@" in str(image_id) for image_id in ids)


def test_what_cannot_be_cut_or_resumed_is_refused_by_name(server, script, settings, tiled, data, tmp_path):
    args, reference = tiled
    changed = server.run(script, [*args, "--run.output_dir", reference.parent, "--run.name", "reference",
                                  "--data.tile", 32])  # fmt: skip
    assert changed.code == 2 and "data.tile 40 -> 32: refused" in changed.text
    wrong = server.run(script, settings("--run.output_dir", tmp_path, "--data.tile", 40, "--data.tile_overlap", 0.95))
    assert wrong.code == 2 and "data.tile_overlap is 0.95" in wrong.text
    graphs = small_settings(SCRIPTS[3], data, ["--run.output_dir", tmp_path, "--data.tile", 40])
    refused = server.run(SCRIPTS[3], graphs)
    assert refused.code == 2 and "data.tile 40: the relations of a scene graph" in refused.text
