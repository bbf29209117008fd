"""The command line of a training script: slips lead to what was meant, and every fault is a sentence."""

import errno
import os
import re
import sys
import threading
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import torch
from places import ROOT

from toolkit.base.errors import (
    BadInput,
    FailedElsewhere,
    as_sentences,
    check_environment,
    exit_on_bad_input,
    is_out_of_memory,
)
from toolkit.base.files import near_names, warn_if_stalled
from toolkit.base.public import without_machine
from toolkit.data.columns import read_columns
from toolkit.data.table_cache import write_rows
from toolkit.detectors.ssd.options import SsdOptions
from toolkit.run.command_line import parse_config, run_script
from toolkit.run.settings import DataConfig, LossConfig, OptimConfig, RunConfig, ScheduleConfig


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    model: SsdOptions = field(default_factory=SsdOptions)


def do_nothing(config) -> None:
    pass


def said(words: list[str], capsys) -> str:
    """What a script says of arguments that it refuses."""
    assert run_script(do_nothing, Config, None, words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    return printed


def said_by_all(error: Exception, capsys) -> list[str]:
    """What a training and another program say when `error` is raised in them."""

    def main(*_):
        raise error

    texts = []
    for program in (lambda: run_script(main, Config, argv=[]), exit_on_bad_input(main)):
        assert program() == 2
        texts.append(capsys.readouterr().err)
    return texts


# ---- words that are wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr 0.1", "--lr: no such flag; did you mean --optim.lr?"),
        ("--batch-size 4", "did you mean --data.batch_size_per_device?"),
        ("--optim.learning_rate 1", "did you mean --optim.lr?"),
        ("--epoch 3", "did you mean --run.epochs?"),
        ("--run.max_stesp 3", "did you mean --run.max_steps?"),
        ("--coco_path x", "did you mean --data.path?"),
        ("--weights x.pt", "did you mean --model.pretrained?"),
        ("--num_classes 3", "the classes are those of your data"),
        ("--model.num_classes 3", "the classes are those of your data"),
        ("--device cuda", "a GPU is used if there is one"),
        ("--run 3", "it is a group of settings, see --help run"),
        ("--run.flag null", "no such flag"),
        ("--data x", "did you mean --data.path?"),
        ("data=x", "data=x: not a flag; here it is --data.path x"),
        ("model=x.pt", "here it is --model.pretrained x.pt"),
        ("imgsz=64 nc=3", "nc=3: not a flag, and there is nothing to set"),
        ("DIR", "DIR: not a flag; expected --group.key VALUE"),
        ("--data.path my data", "data: not expected after --data.path my, since a flag has one value; put quotes"),
        ("--data.scales 320 640", "640: not expected after --data.scales 320"),
        ("--run.name --run.epochs 3", "--run.name: it has no value"),
        ("--data.image_size 640x480", "A height and a width are a list: [480, 640]"),
        ("--model.architecture rtdetr", "did you mean rt_detr_v2, which train_detr.py trains?"),
        ("--model.architecture detr", "; train_detr.py trains it"),
        ("--model.architecture SSD-lite", "did you mean ssdlite?"),
        ("--config no.yaml", "--config no.yaml: no such file"),
        ("--config configs/ssd/owndata.yaml", "configs/ssd/own_data.yaml"),
        ("--config configs/ssd/bccd.yaml", "no such file in the current folder; did you mean "),
        ("--config folder", "--config folder: this is a folder; expected a file"),
        ("--config flat.yaml", "with `name: mine` below it; did you mean optim.lr?"),
        ("--config named.yaml", "named.yaml: no such setting run.batch; did you mean data.batch_size_per_device?"),
        ("--config ~nobody_of_this_name/a.yaml", "a path that begins with `~` has no meaning here"),
    ],
)
def test_the_commonest_slips_lead_to_what_was_meant(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "flat.yaml").write_text("lr: 0.1\n")
    (tmp_path / "named.yaml").write_text("run: {batch: 4}\n")
    assert expected in said(words.split(), capsys)


# A setting of each kind, a value that it does not take, and what is said of it.
WRONG_VALUES = (
    ("run.name", "null", "is null; expected text"),
    ("run.output_dir", "NULL", "is null; expected text"),
    ("run.eval_every", "null", "is null; expected a whole number of at least 0 or a number of steps"),
    ("run.tracker", "null", "is null; expected a list"),
    ("run.deterministic", "null", "is null; expected true or false"),
    ("run.meters", "null", "is null; expected one of epoch_median"),
    ("run.seed", "-1", "is -1; expected"),
    ("run.tf32", "perhaps", "is perhaps; expected true or false or null"),
    ("data.val", "null", "is null; expected text or a number or a list"),
    ("data.path", "[a, null]", 'is ["a", null]; expected text or a list'),
    ("data.scales", "[320, null]", "is [320, null]; expected a list (a whole number above 0 each)"),
    ("schedule.milestones", "[1, null]", "is [1, null]; expected a list"),
    ("optim.ema_decay", "null", "is null; expected a number from 0 to 1"),
    ("optim.max_norm", "-1", "is -1; expected a number of at least 0"),
    ("optim.max_norm", "nan", "is nan; expected"),
    ("optim.lr", "inf", "is Infinity; expected"),
    ("optim.lr", "1e400", "expected"),
    ("optim.lr_multipliers", "{head: .inf}", "expected a mapping"),
    ("optim.lr_multipliers.head", "null", 'is {"head": null}; expected a mapping'),
    ("optim.lr_multipliers.head", "fast", 'is {"head": "fast"}; expected a mapping'),
    ("loss.weights.loss_ce", "null", 'is {"loss_ce": null}; expected a mapping'),
    ("loss.weights", "{loss_ce: null}", 'is {"loss_ce": null}; expected a mapping'),
    ("model.pretrained_backbone", "null", "is null; expected true or false or text"),
    ("model.norm", "null", "is null; expected one of batch"),
    ("model.aspect_ratios", "null", "is null; expected a list"),
)


@pytest.mark.parametrize(("name", "value", "expected"), WRONG_VALUES)
def test_a_value_of_another_kind_is_refused_in_words(name, value, expected, capsys):
    printed = said([f"--{name}", value], capsys)
    assert ".".join(name.split(".")[:2]) in printed
    assert expected in printed
    assert "typing." not in printed


@pytest.mark.parametrize("group", ["run", "optim"])
def test_null_is_taken_or_refused_in_words_by_every_setting(group):
    for setting in fields(getattr(Config(), group)):
        if setting.name.startswith("_"):
            continue
        try:
            made = parse_config(Config, [f"--{group}.{setting.name}", "null"])
            assert getattr(getattr(made, group), setting.name) in (None, "null")
        except BadInput as error:
            assert f"{group}.{setting.name} is null; expected " in str(error)


@pytest.mark.parametrize("name", ["run.max_steps", "model.pretrained", "data.image_dir", "optim.compile"])
def test_null_is_taken_where_it_means_something(name):
    group, key = name.split(".")
    config = parse_config(Config, [f"--{name}", "null"])
    assert getattr(getattr(config, group), key) is None


def test_all_slips_are_named_together():
    with pytest.raises(BadInput) as raised:
        parse_config(Config, ["epochs=3", "--lr", "0.1", "--optim.lrr", "1", "--run.name"])
    names = [problem.partition(":")[0] for problem in raised.value.problems[:-1]]
    assert names == ["--run.name", "epochs=3", "--lr", "--optim.lrr"]


def test_settings_that_are_not_utf_8_are_refused():
    with pytest.raises(BadInput, match=r"run\.name is 'a\?', where \? stands for bytes that are not UTF-8"):
        parse_config(Config, ["--run.name", "a\udcff"])


def test_errors_that_were_printed_before_are_not_printed_again(capsys):
    error = BadInput(["a: gone", "b: gone"])
    error.told = ["a: gone"]
    assert said_by_all(error, capsys)[0] == "error: b: gone\n"
    error.told = error.problems
    assert said_by_all(error, capsys)[0] == "This run cannot start: see above.\n"


def test_a_launcher_is_said_to_print_a_traceback_of_its_own(monkeypatch, capsys):
    assert "traceback" not in said(["--lr", "1"], capsys)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert said(["--lr", "1"], capsys).splitlines()[-1].startswith("A traceback below this line is of `accelerate")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "traceback" not in said(["--lr", "1"], capsys)


def test_a_fault_of_yaml_is_shown_with_its_line(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text("run: {max_steps: 3\ndata: [\n")
    text = said(["--config", str(file)], capsys)
    assert "YAML: line 2, column 5: expected ',' or '}', but got ':' (while parsing a flow mapping of line 1)" in text
    assert "\n    data: [\n        ^\n" in text
    file.write_text("data: {image_size: 64, image_size: 96}\n")
    assert "YAML: line 1, column 24: the key image_size appears twice\n" in said(["--config", str(file)], capsys)


def test_only_similar_names_are_suggested_for_a_missing_path(tmp_path):
    for name in ("resnet18.pth", "own_data.yaml"):
        (tmp_path / name).touch()
    assert near_names(tmp_path / "owndata.yml") == f"; did you mean {tmp_path / 'own_data.yaml'}?"
    assert "did you mean" not in near_names(tmp_path / "best.pth"), "an equal suffix does not make it similar"


def test_a_home_that_is_not_there_is_one_sentence(monkeypatch, capsys):
    @exit_on_bad_input
    def main():
        Path("~nobody_of_this_name/x").expanduser()

    assert main() == 2
    assert "error: a path that begins with `~` has no meaning here" in capsys.readouterr().err

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert without_machine("/data/of/someone/a.jpg", "/elsewhere") == "someone/a.jpg"


# ---- what the system refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "ENOSPC EDQUOT EROFS EACCES ENOENT EMFILE ENAMETOOLONG EFBIG EIO".split())
def test_what_the_file_system_refuses_is_one_sentence(name, capsys):
    texts = said_by_all(OSError(getattr(errno, name), "x", "/a/" + "b" * 300), capsys)
    for text in texts:
        assert text.startswith("error: /a/bbb")
        assert "What to do: " in text
        assert len(text) < 450
    assert "--run.resume" not in texts[-1], "of a program that trains nothing"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 26.0 MiB"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("scipy/_core.so: failed to map segment from shared object"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: Error code 12 (Cannot allocate memory)"),
    ],
)
def test_memory_that_runs_out_is_one_sentence(error, capsys):
    for text in said_by_all(error, capsys):
        assert text.startswith("error: out of memory")
        assert "`ulimit -v`" in text
        assert text.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_of_a_device_that_runs_out_is_one_sentence(error, capsys):
    assert is_out_of_memory(error)
    for text in said_by_all(error, capsys):
        assert text.startswith("error: out of memory: CUDA")
        assert "--data.batch_size_per_device" in text


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the address space, as Linux has it")
def test_a_table_that_finds_no_room_in_the_address_space_is_one_sentence(tmp_path):
    import resource

    table = write_rows([], cache_file=tmp_path / "table.json", categories=[])
    os.truncate(table.arrow_files[0], 2**41)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**40, before[1]))
    try:
        with pytest.raises(BadInput, match="out of memory.*`ulimit -v`"), as_sentences():
            read_columns(table.arrow_files[0])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module"),
        RuntimeError("shapes differ"),
        OSError("a defect"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
    ],
)
def test_other_errors_keep_their_traceback(error):
    def main():
        raise error

    with pytest.raises(type(error)), as_sentences():
        main()
    with pytest.raises(type(error)):
        exit_on_bad_input(main)()


def test_a_disk_that_stalls_is_waited_for_and_that_is_said(monkeypatch):
    texts = []
    told = threading.Event()

    def say(text):
        texts.append(text)
        told.set()

    with monkeypatch.context() as patch:
        patch.setattr("toolkit.base.files.STALLED_S", 0)
        with warn_if_stalled("the checkpoint of step 3", say):
            assert told.wait(60)
    (text,) = texts
    assert text.startswith("still waiting for the disk, for 0 s now: the checkpoint of step 3; ")
    with warn_if_stalled("a row", texts.append):
        (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        assert timer.interval == 30
    assert timer.finished.is_set()
    assert len(texts) == 1


def test_a_script_ends_with_1_when_another_process_failed(capsys):
    def fail(config):
        raise FailedElsewhere("rank 1 failed: killed")

    assert run_script(fail, Config, argv=[]) == 1
    assert capsys.readouterr().err == "stopped: rank 1 failed: killed\n"


# ---- the environment -------------------------------------------------------------------------------------------------


def test_variables_that_libraries_would_fail_on_are_named_together(monkeypatch, capsys):
    odd = {"WORLD_SIZE": "two", "RANK": "", "ACCELERATE_USE_CPU": "perhaps"}
    for name, value in odd.items():
        monkeypatch.setenv(name, value)
    for text in said_by_all(RuntimeError("this is never reached"), capsys):
        for name, value in odd.items():
            assert f"the environment variable {name} is {value!r}" in text
    check_environment({"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_CPU": "true"})


def test_what_the_launcher_asks_for_in_vain_ends_a_script(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "ACCELERATE_USE_FSDP" in said([], capsys)


@pytest.mark.parametrize("value", ["error", "e", "default,error::DeprecationWarning", " error "])
def test_warnings_that_would_end_a_program_are_named(value):
    with pytest.raises(BadInput, match="PYTHONWARNINGS has '(e|error).*expected default or ignore"):
        check_environment({"PYTHONWARNINGS": value})


@pytest.mark.parametrize("value", ["", "default", "ignore,always", "error:::mine", "error:old name::mine"])
def test_other_filters_of_warnings_are_left_alone(value):
    check_environment({"PYTHONWARNINGS": value})


def test_warnings_of_the_project_are_one_plain_line():
    ours = str(ROOT / "toolkit/run/writer.py")
    formatted = []

    def main(config):
        formatted.append(warnings.formatwarning("it failed", UserWarning, ours, 1))
        formatted.append(warnings.formatwarning("it failed", UserWarning, "other/module.py", 1))

    assert run_script(main, Config, argv=[]) == 0
    assert formatted[0] == "warning: it failed\n"
    assert "other/module.py:1: UserWarning: it failed\n" in formatted[1]
    assert "UserWarning" in warnings.formatwarning("it failed", UserWarning, ours, 1), "as before, afterwards"


@pytest.mark.parametrize(("rank", "level"), [("0", None), ("1", "ERROR")])
def test_what_torch_warns_of_is_said_by_the_first_process_alone(monkeypatch, rank, level):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")  # restored at the end
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    monkeypatch.setenv("RANK", rank)
    assert run_script(do_nothing, Config, argv=[]) == 0
    assert os.environ.get("TORCH_CPP_LOG_LEVEL") == level


def test_every_row_of_what_happens_when_names_a_test_that_there_is():
    page = (ROOT / "docs" / "failures.md").read_text()
    tables = re.findall(r"^\| fault .*\n\|[-|]+\n((?:\| .*\n)+)", page, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"[\w/]+\.py", row.partition("<!-- ")[2])
        assert named, row
        for name in named:
            assert (ROOT / "tests" / name).is_file(), row
