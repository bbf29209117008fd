"""check_data.py on clean and on faulty data: exit codes, the report, the clean copy, and its flags."""

import json

import pytest
from dirty_sets import check_set, sets_in
from documents import BCCD, DIRTY, needs_bccd
from flags import parser_of
from places import ROOT
from small_data import one_image_folder

from scripts import check_data
from toolkit.tools.doctor.program import data_settings
from toolkit.tools.shapes import make_shapes


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(ROOT / "scripts")  # where check_data.py finds the other scripts


def check(*arguments) -> int:
    """Return the exit code of scripts/check_data.py."""
    return check_data.main([str(argument) for argument in arguments])


# ---- reports and copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", sets_in("check_data"))
def test_reports(one, tmp_path):
    check_set(one, tmp_path)


def test_the_copy_of_the_dirty_set_is_clean(tmp_path, capsys):
    dirty = DIRTY / "annotations" / "instances.json"
    assert check(dirty, "--fix", tmp_path / "fixed") == 2
    printed = capsys.readouterr().out
    assert "ERRORS (records that cannot be used): 18" in printed
    assert "19 usable images" in printed
    assert check(dirty, "--on-error", "drop") == 1
    assert check(tmp_path / "fixed") == 0
    assert check(dirty, "--fix", tmp_path / "fixed") == 2  # not empty any more
    assert (tmp_path / "fixed" / "instances" / "png_bytes.png").is_file()  # the ending of its content


@needs_bccd
def test_bccd(tmp_path):
    assert check(BCCD, "--json", tmp_path / "r.json", "--fix", tmp_path / "fixed") == 1
    findings = json.loads((tmp_path / "r.json").read_text())["findings"]
    items = {finding["kind"]: finding["items"] for finding in findings}
    assert items["look alike in two splits"] == [["train/BloodImage_00038.jpg", "val/BloodImage_00037.jpg"]]
    assert sum(len(finding["items"]) for finding in findings if finding["kind"] == "box given twice") == 7
    assert check(tmp_path / "fixed") == 0


def test_pictures_anchors_and_a_report_for_programs_are_written(tmp_path):
    make_shapes(tmp_path / "d", 6, 1, 64)
    config = tmp_path / "c.yaml"
    config.write_text("data: {image_size: 64, mosaic: 0.5, photometric: true, augment: [RandomVerticalFlip]}\n")
    words = [
        "--image-size",
        64,
        "--anchors",
        "--script",
        "train_yolov3",
        "--check-images",
        "header",
    ]
    words += [
        "--pictures",
        tmp_path / "p",
        "--augment",
        config,
        "--json",
        tmp_path / "r.json",
    ]
    code = check(tmp_path / "d", *words)
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert {"positions.png", "sizes.png", "aspect_ratios.png", "augmented.jpg"} < names
    assert sum(name.startswith("samples_") for name in names) == 4
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["exit_code"] == code
    assert report["splits"]["train"]["images"] == 6


@pytest.mark.parametrize(
    ("file", "said"),
    [("c.yaml", "--script train_detr"), ("none.yaml", "none.yaml: expected a")],
)
def test_settings_that_cannot_be_drawn_with_are_refused(tmp_path, capsys, file, said):
    (tmp_path / "c.yaml").write_text("data: {image_size: 64}\n")  # which script's defaults hold is not known
    one_image_folder(tmp_path, "csv")
    assert check(tmp_path, "--augment", tmp_path / file, "--check-images", "none") == 2
    assert said in capsys.readouterr().err


# ---- settings and flags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "counts_pixels"), [("yolov3", False), ("ssd", True)])
def test_a_settings_file_is_completed_by_its_own_script(name, counts_pixels):
    settings = data_settings(ROOT / "configs" / name / "own_data.yaml")
    assert settings.recipe == name
    assert settings.multi_scale_pixels == counts_pixels


def test_the_settings_of_a_run_need_no_script(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {recipe: ssd, image_size: 32}")
    assert data_settings(tmp_path / "config.yaml").recipe == "ssd"


def test_flags_of_training_are_taken():
    parse = parser_of("check_data").parse_args
    options = parse(
        [
            "DIR",
            "--data.image_dir",
            "x",
            "--data.on_error",
            "drop",
            "--data.format",
            "yolo",
        ]
    )
    assert options == parse(["DIR", "--image-dir", "x", "--on-error", "drop", "--format", "yolo"])
    assert options.image_dir == ["x"]


@pytest.mark.parametrize(
    "words",
    ["--image-dir a --data.image_dir b", "--data.image_dir [a,b]", "--image-dir a b"],
)
def test_folders_of_images_are_given_one_by_one_or_as_settings_have_them(words):
    assert parser_of("check_data").parse_args(["DIR", *words.split()]).image_dir == [
        "a",
        "b",
    ]


def test_half_a_list_of_folders_is_refused(capsys):
    with pytest.raises(SystemExit):
        parser_of("check_data").parse_args(["DIR", "--image-dir", "[a, {]"])
    assert "expected a folder, or a list of folders such as [images, more.zip]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "program",
    ["check_data", "convert", "evaluate", "export", "report", "toolkit.tools.anchors"],
)
def test_every_flag_about_data_has_its_name_of_training_too(program):
    given = parser_of(program)._option_string_actions
    flags = {f"--{flag}" for flag in ("image-dir", "name", "path", "on-error", "image-size")} & given.keys()
    assert "--image-dir" in flags
    assert {"--data." + flag[2:].replace("-", "_") for flag in flags} <= given.keys()
