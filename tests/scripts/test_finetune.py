"""A run on the weights of another: rows of equal classes kept, parts frozen, the folder needs its source no more."""

import json
import shutil

import pytest
from launching import ROOT, checkpoint_tensors, kill, rows, training_rows


@pytest.fixture(scope="module")
def source(server, script, settings, tmp_path_factory):
    """The folder of a run of two steps on the four classes of the shapes."""
    args = settings("--run.output_dir", tmp_path_factory.mktemp("source"), "--run.max_steps", 2, "--run.eval_every", 0)
    return server.run(script, args).ok().folder


@pytest.fixture(scope="module")
def other_classes(data, tmp_path_factory):
    """The same pictures; the first class is called something else."""
    folder = shutil.copytree(data, tmp_path_factory.mktemp("other") / "shapes")
    paths = {split: folder / "annotations" / f"{split}.json" for split in ("train", "val")}
    for path in paths.values():
        document = json.loads(path.read_text())
        document["categories"][0]["name"] = "hexagon"
        path.write_text(json.dumps(document))
    return [part for split, path in paths.items() for part in (f"--data.{split}", path)]


@pytest.mark.every_script("slow")
def test_a_run_starts_from_another_and_its_folder_is_enough_from_then_on(
    server, script, settings, source, other_classes, tmp_path
):
    copy = shutil.copytree(source, tmp_path / "source", symlinks=True)
    prefix = next(name for name in checkpoint_tensors(copy / "checkpoints" / "latest") if "backbone" in name)
    prefix = prefix.removeprefix("model/")[: prefix.index("backbone") + len("backbone") - len("model/")]
    given = ["--run.output_dir", tmp_path, "--run.name", "tuned", "--run.resume", "latest", "--run.save_every", 2,
             "--model.pretrained", copy, "--model.freeze_prefixes", f"[{prefix}]", "--optim.lr", "1e-5"]  # fmt: skip
    common, taken = settings(*other_classes, *given), "rows of 3 of 4 classes: square, triangle, star"
    if script.name == "train_sgg":  # the head of a graph mixes all classes
        refused = server.run(script, [*common, "--run.name", "refused"])
        assert refused.code == 2 and "hexagon" in refused.text and "model.detector" in refused.text
        common, taken = settings(*given), "head.frequency.table.weight"
    killed = server.run(script, common, 1, [kill(4)])
    assert killed.code == -9
    table = (killed.folder / "pretrained.txt").read_text()
    assert taken in table and "loaded" in killed.text

    shutil.rmtree(copy)
    ended = server.run(script, common).ok()
    assert "Resuming from" in ended.text and "loaded" not in ended.text
    assert [row["step"] for row in training_rows(ended.folder)] == list(range(1, len(training_rows(ended.folder)) + 1))
    before, after = (checkpoint_tensors(folder / "checkpoints" / "latest") for folder in (source, ended.folder))
    frozen = [name for name in after if name.startswith(f"model/{prefix}")]
    assert frozen and all(after[name].equal(before[name]) for name in frozen), "batch statistics included"
    assert not all(after[name].equal(before[name]) for name in before if after[name].shape == before[name].shape)

    latest = ended.folder / "checkpoints" / "latest"
    evaluated = server.run(ROOT / "scripts" / "evaluate.py", [latest, "--weights", "model"])
    assert evaluated.code == 0, evaluated.text
    last = rows(ended.folder)[-1]
    assert json.loads(evaluated.text.splitlines()[-1])["bbox_AP"] == last["val/bbox_AP"]


def test_every_rank_starts_from_the_same_weights(server, script, settings, source, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.name", "ranks", "--model.pretrained", source,
                    "--run.max_steps", 1, "--run.eval_every", 0, "--optim.lr", 0)  # fmt: skip
    ended = server.run(script, args, 2).ok()
    before, after = (checkpoint_tensors(folder / "checkpoints" / "latest") for folder in (source, ended.folder))
    counted = ("running_mean", "running_var", "num_batches_tracked")  # by steps, whatever the rate
    learned = [name for name in before if name.startswith("model/") and not name.endswith(counted)]
    assert learned and all(after[name].equal(before[name]) for name in learned)
    assert ended.text.count("weights of") == 1, "said once"
