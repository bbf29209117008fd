"""What the system, or the launcher, gets wrong becomes one sentence; what a training can do without costs one line."""

import errno
import os
import re
import sys
import threading
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path

import places
import pytest
import torch

from toolkit.base.errors import (
    BadInput,
    FailedElsewhere,
    as_sentences,
    check_environment,
    exit_on_bad_input,
    is_out_of_memory,
)
from toolkit.base.files import ROOT, near_names, warn_if_stalled
from toolkit.base.public import without_machine
from toolkit.data.columns import read_columns
from toolkit.data.table_cache import write_rows
from toolkit.detectors.ssd.options import SsdOptions
from toolkit.run import processes
from toolkit.run.best import no_such_metric
from toolkit.run.command_line import parse_config, run_script
from toolkit.run.folder import attempt
from toolkit.run.launcher import refuse
from toolkit.run.settings import DataConfig, LossConfig, OptimConfig, RunConfig, ScheduleConfig
from toolkit.run.writer import RunWriter


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class SsdConfig(Config):
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    model: SsdOptions = field(default_factory=SsdOptions)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EMFILE,
                                    errno.ENAMETOOLONG, errno.EFBIG, errno.EIO])  # fmt: skip
def test_what_the_file_system_refuses_is_one_sentence(number, capsys):
    for error in said_of(OSError(number, "x", "/a/" + "b" * 300), capsys):
        assert error.startswith("error: /a/bbb") and "What to do: " in error and len(error) < 450
    assert "--run.resume" not in error, "of a program that trains nothing"


def said_of(error, capsys):
    """By a training, and by another program."""

    def main(*_):
        raise error

    for program in (lambda: run_script(main, Config, argv=[]), exit_on_bad_input(main)):
        assert program() == 2
        yield capsys.readouterr().err


@pytest.mark.parametrize("error", [
    MemoryError(), MemoryError("Unable to allocate 26.0 MiB"), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ImportError("scipy/_core.so: failed to map segment from shared object"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: Error code 12 (Cannot allocate memory)"),
])  # fmt: skip
def test_memory_that_runs_out_is_one_sentence_in_every_program(error, capsys):
    for said in said_of(error, capsys):
        assert said.startswith("error: out of memory") and "`ulimit -v`" in said and said.count("\n") == 1


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
])  # fmt: skip
def test_memory_of_a_device_that_runs_out_is_a_sentence_wherever_it_happens(error, capsys):
    for said in said_of(error, capsys):
        assert said.startswith("error: out of memory: CUDA") and "--data.batch_size_per_device" in said
    assert is_out_of_memory(error)


def test_environment_variables_that_libraries_would_fail_on_are_named_together(monkeypatch, capsys):
    odd = {"WORLD_SIZE": "two", "RANK": "", "ACCELERATE_USE_CPU": "perhaps"}
    for name, value in odd.items():
        monkeypatch.setenv(name, value)
    for said in said_of(RuntimeError("this is never reached"), capsys):
        assert all(f"the environment variable {name} is {value!r}" in said for name, value in odd.items())
    check_environment({"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_CPU": "true"})


@pytest.mark.parametrize("value", ["error", "e", "default,error::DeprecationWarning", " error "])
def test_warnings_that_would_end_a_program_are_named(value):
    with pytest.raises(BadInput, match="PYTHONWARNINGS has '(e|error).*expected default or ignore"):
        check_environment({"PYTHONWARNINGS": value})


@pytest.mark.parametrize("value", ["", "default", "ignore,always", "error:::mine", "error:old name::mine"])
def test_other_filters_of_warnings_are_left_alone(value):
    check_environment({"PYTHONWARNINGS": value})


def test_flags_of_other_types_are_named_together_in_words():
    with pytest.raises(BadInput) as raised:
        parse_config(Config, ["--optim.ema_decay", "null", "--optim.max_norm", "-1", "--run.tf32", "perhaps"])
    assert [problem.partition(": ")[2] for problem in raised.value.problems[:-1]] == [
        "optim.ema_decay is null; expected a number from 0 to 1",
        "optim.max_norm is -1; expected a number of at least 0",
        "run.tf32 is perhaps; expected true or false or null",
    ]


@pytest.mark.parametrize(("group", "kind"), [("run", RunConfig), ("optim", OptimConfig)])
def test_null_is_taken_or_refused_in_words_by_every_setting(group, kind):
    for setting in fields(kind):
        if setting.name.startswith("_"):
            continue
        try:
            made = parse_config(Config, [f"--{group}.{setting.name}", "null"])
            assert getattr(getattr(made, group), setting.name) in (None, "null")
        except BadInput as error:
            assert f"{group}.{setting.name} is null; expected " in str(error)


def test_settings_that_are_not_utf_8_are_refused_before_anything_is_written():
    with pytest.raises(BadInput, match=r"run\.name is 'a\?', where \? stands for bytes that are not UTF-8"):
        parse_config(Config, ["--run.name", "a\udcff"])


@pytest.mark.parametrize(("flag", "value", "expected"), [
    ("--run.name", "null", "run.name is null; expected text"),
    ("--run.output_dir", "NULL", "run.output_dir is null; expected text"),
    ("--run.eval_every", "null", "run.eval_every is null; expected a whole number of at least 0 or a number of steps"),
    ("--run.tracker", "null", "run.tracker is null; expected a list"),
    ("--run.flag", "null", "no such flag"),
    ("--run.deterministic", "null", "run.deterministic is null; expected true or false"),
    ("--run.meters", "null", "run.meters is null; expected one of epoch_median"),
    ("--data.val", "null", "data.val is null; expected text or a number or a list"),
    ("--data.path", "[a, null]", 'data.path is ["a", null]; expected text or a list'),
    ("--data.scales", "[320, null]", r"data.scales is [320, null]; expected a list (a whole number above 0 each)"),
    ("--schedule.milestones", "[1, null]", "schedule.milestones is [1, null]; expected a list"),
    ("--optim.ema_decay", "null", "optim.ema_decay is null; expected a number from 0 to 1"),
    ("--optim.lr_multipliers.head", "null", 'optim.lr_multipliers is {"head": null}; expected a mapping'),
    ("--optim.lr_multipliers.head", "fast", 'optim.lr_multipliers is {"head": "fast"}; expected a mapping'),
    ("--loss.weights.loss_ce", "null", 'loss.weights is {"loss_ce": null}; expected a mapping'),
    ("--loss.weights", "{loss_ce: null}", 'loss.weights is {"loss_ce": null}; expected a mapping'),
    ("--model.pretrained_backbone", "null", "model.pretrained_backbone is null; expected true or false or text"),
    ("--model.norm", "null", "model.norm is null; expected one of batch"),
    ("--model.aspect_ratios", "null", "model.aspect_ratios is null; expected a list"),
    ("--config", "~nobody_of_this_name/a.yaml", "a path that begins with `~` has no meaning here"),
])  # fmt: skip
def test_null_is_refused_by_every_kind_of_setting_that_does_not_take_it(flag, value, expected, capsys):
    assert run_script(lambda config: None, SsdConfig, None, [flag, value]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and expected in printed and "typing." not in printed


@pytest.mark.parametrize(("words", "expected"), [
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
    ("--data x", "did you mean --data.path?"),
    ("data=x", "data=x: it is not a flag; here it is --data.path x"),
    ("model=x.pt", "here it is --model.pretrained x.pt"),
    ("imgsz=64 nc=3", "nc=3: it is not a flag, and there is nothing to set"),
    ("DIR", "DIR: it follows no flag; expected --group.key VALUE"),
    ("--data.path my data", "data: it follows --data.path my, and a flag has one value; put quotes"),
    ("--data.scales 320 640", "640: it follows --data.scales 320"),
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
])  # fmt: skip
def test_the_commonest_slips_lead_to_what_was_meant(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "flat.yaml").write_text("lr: 0.1\n")
    (tmp_path / "named.yaml").write_text("run: {batch: 4}\n")
    assert run_script(lambda config: None, SsdConfig, None, words.split()) == 2
    assert expected in capsys.readouterr().err


def test_only_similar_names_are_suggested_for_a_path_that_is_missing(tmp_path):
    for name in ("resnet18.pth", "own_data.yaml"):
        (tmp_path / name).touch()
    assert near_names(tmp_path / "owndata.yml") == f"; did you mean {tmp_path / 'own_data.yaml'}?"
    assert "did you mean" not in near_names(tmp_path / "best.pth"), "an equal suffix does not make it similar"


@pytest.mark.parametrize(("metric", "expected"), [
    ("mAP50", "did you mean bbox_AP50?"), ("mAP50-95", "did you mean bbox_AP?"), ("AP/cta", "did you mean AP/cat?"),
    ("ema/mAP", "did you mean ema/bbox_AP?"), ("AP", "did you mean bbox_AP?"),
    ("nonsense", "there are bbox_AP, bbox_AP50, ema/NAME of averaged weights, AP/CLASS of a class"),
])  # fmt: skip
def test_a_metric_that_there_is_not_has_a_near_one_or_the_list(metric, expected):
    names = ["bbox_AP", "bbox_AP50", "AP/cat"]
    error = no_such_metric(metric, [*names, *(f"ema/{name}" for name in names)])
    assert str(error) == f"--eval.metric_for_best {metric}: no such metric; {expected}"


def test_warnings_of_the_project_are_one_plain_line():
    modules = ("toolkit/run/writer.py", "other/module.py")
    formatted = []

    def main(config):
        formatted.extend(warnings.formatwarning("it failed", UserWarning, str(ROOT / module), 1) for module in modules)

    assert run_script(main, Config, argv=[]) == 0
    assert formatted[0] == "warning: it failed\n" and "other/module.py:1: UserWarning: it failed\n" in formatted[1]
    assert "UserWarning" in warnings.formatwarning("it failed", UserWarning, str(ROOT / modules[0]), 1)


def test_all_slips_are_named_together():
    with pytest.raises(BadInput) as raised:
        parse_config(Config, ["epochs=3", "--lr", "0.1", "--optim.lrr", "1", "--run.name"])
    assert [problem.partition(":")[0] for problem in raised.value.problems[:-1]] == [
        "--run.name", "epochs=3", "--lr", "--optim.lrr",
    ]  # fmt: skip


def test_null_is_taken_where_it_means_something():
    flags = "--run.max_steps", "--model.pretrained", "--data.image_dir", "--optim.compile"
    words = [word for flag in flags for word in (flag, "null")]
    config = parse_config(SsdConfig, words)
    assert config.run.max_steps is config.model.pretrained is config.data.image_dir is config.optim.compile is None


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


@pytest.mark.parametrize("error", [ImportError("no module"), RuntimeError("shapes differ"), OSError("a defect"),
                                   BrokenPipeError(errno.EPIPE, "Broken pipe")])  # fmt: skip
def test_other_errors_keep_their_traceback(error):
    def main():
        raise error

    with pytest.raises(type(error)), as_sentences():
        main()
    with pytest.raises(type(error)):
        exit_on_bad_input(main)()


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


def test_a_disk_that_stalls_is_waited_for_and_that_is_said(monkeypatch):
    said, told = [], threading.Event()

    def say(text):
        said.append(text)
        told.set()

    with monkeypatch.context() as patch:
        patch.setattr("toolkit.base.files.STALLED_S", 0)
        with warn_if_stalled("the checkpoint of step 3", say):
            assert told.wait(60)
    (text,) = said
    assert text.startswith("still waiting for the disk, for 0 s now: the checkpoint of step 3; ")
    with warn_if_stalled("a row", said.append):
        (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        assert timer.interval == 30
    assert timer.finished.is_set() and len(said) == 1


def test_a_script_ends_with_1_when_another_process_failed(capsys):
    def elsewhere(config):
        raise FailedElsewhere("rank 1 failed: killed")

    assert run_script(elsewhere, Config, argv=[]) == 1
    assert capsys.readouterr().err == "stopped: rank 1 failed: killed\n"


def test_what_torch_warns_of_is_said_by_the_first_process_alone(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")  # restored at the end
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    for rank, level in (("0", None), ("1", "ERROR")):
        monkeypatch.setenv("RANK", rank)
        assert run_script(lambda config: None, Config, argv=[]) == 0
        assert os.environ.get("TORCH_CPP_LOG_LEVEL") == level


@pytest.mark.parametrize(("name", "value", "word"), [
    ("ACCELERATE_USE_FSDP", "true", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "True", "DeepSpeed"),
    ("ACCELERATE_USE_MEGATRON_LM", "1", "Megatron"), ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "parallelism"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "--optim.accumulation_steps 4"), ("PJRT_DEVICE", "TPU", "TPU"),
    ("ACCELERATE_MIXED_PRECISION", "fp8", "fp8"),
])  # fmt: skip
def test_what_the_launcher_asks_for_and_scripts_do_not_do_is_refused(name, value, word, capsys, monkeypatch):
    with pytest.raises(BadInput, match=word):
        refuse(None, {name: value})
    monkeypatch.setenv(name, value)
    assert run_script(lambda config: None, Config, argv=[]) == 2
    assert name in capsys.readouterr().err
    # what a launcher always sets is fine
    refuse(None, {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
                  "ACCELERATE_MIXED_PRECISION": "bf16", "PJRT_DEVICE": "CPU"})  # fmt: skip


@pytest.mark.parametrize("argv", [["--optim.lr", "inf"], ["--optim.lr", "1e400"], ["--optim.max_norm", "nan"],
                                  ["--optim.lr_multipliers", '{"head": .inf}'], ["--run.seed", "-1"]])  # fmt: skip
def test_a_setting_that_is_no_number_to_compute_with_is_refused(argv):
    with pytest.raises(BadInput, match=argv[0].removeprefix("--")):
        parse_config(Config, argv)


def test_what_training_can_do_without_costs_a_line(tmp_path):
    said = []

    def broken():
        raise ZeroDivisionError("no pictures today\nor ever")

    assert attempt("the report", broken, tmp_path, said.append) is None
    assert attempt("the report", lambda: 3, tmp_path, said.append) == 3
    (line,) = said
    assert "the report failed, and the run goes on without (ZeroDivisionError: no pictures today)" in line
    assert re.search(r"Traceback[^\0]*or ever", (tmp_path / "errors.log").read_text())
    attempt("the report", broken, tmp_path / "gone", said.append)
    assert len(said) == 2
    with pytest.raises(KeyboardInterrupt):
        attempt("the report", lambda: (_ for _ in ()).throw(KeyboardInterrupt), tmp_path, said.append)


def test_a_removed_run_folder_is_noticed_at_the_next_row(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log({"step": 1})
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(BadInput, match="was removed while the run wrote to it"):
        writer.log({"step": 2})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_several_gpus_asked_for_where_there_is_none(monkeypatch):
    """`accelerate launch --multi_gpu`, by what it sets; torchrun alone asks for nothing."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "ACCELERATE_MIXED_PRECISION": "no"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with pytest.raises(BadInput, match="there is none here.*ACCELERATE_USE_CPU=true torchrun"):
        processes.start_accelerator(None)
    asked = []
    monkeypatch.setattr(processes, "Accelerator", lambda **kwargs: asked.append(kwargs))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    processes.start_accelerator(None)
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    processes.start_accelerator(None)
    assert len(asked) == 2


def test_fp16_is_not_used_on_a_cpu_and_that_is_said(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(processes, "Accelerator", lambda **kwargs: asked.append(kwargs["mixed_precision"]))
    # It is said at the first start of a process alone, and an earlier test may have made one here.
    monkeypatch.setattr(processes.PartialState, "_shared_state", {})
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    processes.start_accelerator("fp16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    processes.start_accelerator(None)
    assert capsys.readouterr().out.count("fp16 needs a GPU") == 2
    processes.start_accelerator("bf16")
    assert asked == ["no", "no", "bf16"] and "fp16" not in capsys.readouterr().out


def test_every_row_of_what_happens_when_names_a_test_that_there_is():
    root = places.ROOT
    lines = (root / "docs" / "failures.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| fault ")]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(?:tests/)?((?:scripts/)?test_\w+\.py)", row.rsplit("|", 2)[1])
        assert named and all((root / "tests" / name).is_file() or (root / "tests" / "scripts" / name).is_file()
                             for name in named), row  # fmt: skip
