"""The model card of a final folder, and its way to a hub on loopback."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from exported_detectors import SMALL
from huggingface_hub import ModelCard
from launching import SCRIPTS, finish, small_settings, start
from local_hub import local_hub
from places import ASSETS, ROOT
from safetensors.torch import load_file

from scripts import train_ssd
from toolkit.base.errors import BadInput
from toolkit.base.public import without_machine
from toolkit.data.table import Category
from toolkit.models import build_detector
from toolkit.run.command_line import run_script
from toolkit.tools.publish.card import write_card
from toolkit.tools.publish.push import check_push, final_folder, push, write_run_card
from toolkit.tools.shapes import make_shapes

CATEGORIES = [Category(7, "cup"), Category(90, "plate: large")]
FINISHED = ASSETS / "finished_run"  # without its weights; the last row of its metrics is torn by a kill


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = shutil.copytree(FINISHED, tmp_path_factory.mktemp("runs") / "cups")
    detector = build_detector("ssd", class_names=[category.name for category in CATEGORIES], **SMALL["ssd"])
    detector.save_final(folder / "final", CATEGORIES, {"height": 64, "width": 64})
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "cups")


def test_the_card_is_read_by_the_hub_and_says_where_the_model_comes_from(run):
    card = ModelCard.load(run / "final" / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "object-detection"
    figures = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert figures == {"bbox_AP": 0.31, "bbox_AP50": 0.6}  # of the best step, of the averaged weights
    told = [
        "--run.name 'cups of tea'",
        "abc123 with changes",
        "12 images, 34 boxes",
        "0.3100",
        "H100",
        "cosine",
    ]
    told += [
        "2 classes: `cup`, `plate: large`",
        "predictions.png",
        "open_predictor",
        "Intended use",
    ]
    for words in told:
        assert words in card.text, words
    assert (run / "final" / "predictions.png").read_text() == "picture"


def test_a_card_written_again_has_intervals_and_harmless_names(run):
    (run / "report" / "report.json").write_text(json.dumps({"intervals_95": {"AP": [0.25, 0.36]}}))
    write_card(run / "final", ["cup", "[plate](http://b.c) <img src=x>"], "mit")
    card = ModelCard.load(run / "final" / "README.md")
    assert "`[plate](http://b.c) <img src=x>`" in card.text
    assert card.text.count("<img") == 1
    assert card.data.license == "mit"
    assert "| AP | 0.3100 | 0.2500 to 0.3600 |" in card.text


def test_nothing_that_is_published_names_the_machine(finished, tmp_path, monkeypatch):
    """Neither the data set, the command and the settings, nor what lies beside the weights."""
    home = tmp_path / "home" / "somebody"
    here = home / "project"
    monkeypatch.setenv("HOME", str(home))
    run = shutil.copytree(finished, here / "runs" / "cups")
    cups = f"{home}/sets/cups/train.json"
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["data"] |= {"train": cups, "val": "/mnt/secret-server/sets/cups/val.json"}
    settings["model"] |= {"pretrained": f"{here}/runs/first", "backbone_options": {"files": [f"{home}/w.pth"]}}
    settings["loss"] = {"teacher": "/mnt/secret-server/runs/teacher"}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    environment = json.loads((run / "environment.json").read_text())
    environment["working_directory"] = str(here)
    environment["command_line"] = [f"{here}/scripts/train_ssd.py", f"--data.train={cups}"]
    environment["command_line"] += ["--run.output_dir", f"{here}/runs"]
    (run / "environment.json").write_text(json.dumps(environment))
    write_card(run / "final", ["cup", "plate"])
    published = "".join(path.read_text() for path in (run / "final").iterdir() if path.suffix in (".md", ".json"))
    for private in (str(tmp_path), "secret-server", "somebody"):
        assert private not in published
    command = "scripts/train_ssd.py '--data.train=~/sets/cups/train.json' --run.output_dir runs"
    for public in (
        command,
        "`cups/val.json`",
        "teacher: runs/teacher",
        "pretrained: runs/first",
    ):
        assert public in published, public


HOME = "/home/me"
PUBLIC = [
    (f"{HOME}/data/cups", "~/data/cups"),
    ("/mnt/a/b/c/train.json", "c/train.json"),
    (f"{ROOT}/configs/ssd/bccd.yaml", "configs/ssd/bccd.yaml"),
    ("/here/x/y", "x/y"),
    ("--x=/mnt/q/r/s", "--x=r/s"),
    ("C:\\Users\\me\\cups\\a.jpg", "cups/a.jpg"),
    ({"a": ["/mnt/a/b/c", 1.5]}, {"a": ["b/c", 1.5]}),
    ("[/mnt/a/b, /mnt/c/d]", "[a/b, c/d]"),
]
PUBLIC += [
    (same, same)
    for same in (
        "runs/cups",
        "a/b",
        "s3://bucket/a/b",
        "https://host/a/b",
        "1/5",
        "/x",
        3,
        None,
    )
]


@pytest.mark.parametrize(("text", "public"), PUBLIC, ids=str)
def test_paths_of_texts_and_settings_become_public(monkeypatch, text, public):
    monkeypatch.setenv("HOME", HOME)
    assert without_machine(text, Path("/here")) == public


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", "model: {"),
        ("config.yaml", "[1]"),
        ("metrics.jsonl", "no row\n"),
        ("final/config.json", "{"),
        ("final/config.json", "{}"),
        ("final/categories.json", "[{}]"),
        ("environment.json", '{"hardware": 3}'),
    ],
)
def test_a_damaged_file_of_the_run_is_one_sentence(run, file, content):
    (run / file).write_text(content)
    with pytest.raises(BadInput, match="final|config|metrics"):
        write_run_card(run)


def test_a_folder_without_a_final_folder_is_refused(run):
    with pytest.raises(BadInput, match="final/ folder"):
        final_folder(run / "report")


def test_a_folder_without_a_run_has_a_card_too(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "rt_detr_v2"}')
    card = ModelCard.load(write_card(tmp_path, ["cup"]))
    assert card.data.library_name == "transformers"
    assert "pipeline(" in card.text
    assert "None were measured" in card.text


@pytest.mark.slow
def test_torchvision_loads_its_own_detector_by_the_card(tmp_path):
    from torchvision.models.detection import fasterrcnn_resnet50_fpn_v2

    detector = build_detector("fasterrcnn_resnet50_fpn_v2", class_names=["cup", "plate"], score_threshold=0.0)
    detector.save_final(tmp_path, CATEGORIES, {"shortest_edge": 96, "longest_edge": 200})
    code = (tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 10
    found = {}
    code = code.replace("PATH", str(tmp_path)).replace('Image.open("photo.jpg")', "Image.new('RGB', (96, 96), '#369')")
    exec(code.replace("print(", "found.setdefault('it', "), {"found": found})
    assert "boxes" in found["it"][0]
    model = fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=3)
    assert model.load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.fixture
def hub(monkeypatch):
    with local_hub() as (hub, constants, env):
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield hub


def test_the_folder_arrives_whole(run, hub):
    (run / "final" / "model.onnx.wrong").write_text("refused")
    assert push(run, "me/cups", private=True).endswith("/me/cups")
    assert hub.created[0]["name"] == "cups"
    assert hub.created[0]["organization"] == "me"
    sent = {path.name: path.read_bytes() for path in (run / "final").iterdir() if path.suffix != ".wrong"}
    assert hub.files == sent
    assert {"README.md", "model.safetensors", "categories.json"} <= set(sent)


@pytest.mark.parametrize(
    ("token", "name", "words"),
    [
        ("hf_reads", "me/cups", "may only read"),
        ("hf_wrong", "me/cups", "did not accept it"),
        ("hf_test", "other/cups", "writes for me, lab only"),
        ("", "me/cups", "HF_TOKEN"),
    ],
)
def test_a_training_asks_first_and_changes_nothing(hub, monkeypatch, capsys, tmp_path, token, name, words):
    for allowed in ("me/cups", "lab/cups", "cups"):
        check_push(allowed)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("HF_TOKEN", token)
    arguments = ["--run.output_dir", str(tmp_path / "runs"), "--hub.push", name]
    assert run_script(train_ssd.main, train_ssd.Config, argv=arguments) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert told.count("error: ") == 1
    assert words in told
    assert hub.created == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_training_ends_on_the_hub(hub, tmp_path):
    make_shapes(tmp_path / "shapes", train_images=16, val_images=8, image_size=64)
    more = [
        "--run.output_dir",
        tmp_path,
        "--run.name",
        "x",
        "--run.max_steps",
        2,
        "--hub.push",
        "me/cups",
    ]
    arguments = small_settings(SCRIPTS[-1], tmp_path / "shapes", more)
    env = {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    code, text = finish(start([sys.executable, ROOT / "scripts" / "train_ssd.py", *arguments], env))
    assert code == 0, text
    assert "uploaded: http://127.0.0.1:" in text
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "x" / "final").iterdir()}
    (line,) = [line for line in hub.files["README.md"].decode().splitlines() if line.startswith("| AP |")]
    assert " to " in line


def test_what_the_hub_refuses_is_told_in_its_words(run, hub, monkeypatch):
    with pytest.raises(BadInput, match="--licence"):
        push(run, "me/cups", licence="my own!")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for name in ("me/cups", "no such/name at all"):
        with pytest.raises(BadInput, match="the hub did not accept it"):
            push(run, name)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(BadInput, match="HF_TOKEN") as error:
        push(run, "me/cups")
    assert len(error.value.problems) == 1
    assert hub.created == []
