"""Reads the settings of `accelerate launch` and refuses those that are not supported; and chooses precision and
compilation of a run from its settings, the launcher, the resumed run and the hardware.

Most flags of `accelerate launch` set no environment variable, so its command line and its settings file are read.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from toolkit.base.errors import BadInput
from toolkit.base.imports import gc_disabled

# What these scripts do not do, with how flags and keys of the settings file that ask for it begin. Accelerate would
# shard nothing, or drop what was asked for, without a word.
OTHER_TRAINERS = {
    "DeepSpeed": ("use_deepspeed", "deepspeed", "zero", "offload_"),
    "FSDP": ("use_fsdp", "fsdp"),
    "Megatron-LM": ("use_megatron_lm", "megatron_lm"),
    "a parallelism config": ("use_parallelism_config", "parallelism_config"),
    "fp8": ("fp8",),
    "SageMaker": ("aws_",),
    "TPU": ("tpu", "vm", "env", "main_training_function", "downcast_bf16", "command", "no_tpu"),
    "MPI": ("mpirun",),
}
_SHARDED = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
DISTRIBUTED_TYPES = _SHARDED | {"TPU": "TPU", "XLA": "TPU"}  # of `distributed_type` in a settings file
SWITCHES = _SHARDED | {"PARALLELISM_CONFIG": "a parallelism config", "SAGEMAKER": "SageMaker"}  # ACCELERATE_USE_...
TPU_VARIABLES = ("PJRT_DEVICE", "XRT_TPU_CONFIG", "TPU_WORKER_ID")
INSTEAD = {"gradient_accumulation_steps": "--optim.accumulation_steps", "gradient_clipping": "--optim.max_norm"}
# Variables that every launch sets, with what they are where nothing was asked for.
COMPILING = {"MODE": "default", "USE_FULLGRAPH": "false", "USE_DYNAMIC": "false"}
_ON = {"true", "1", "yes", "on", "y", "t"}


@dataclass(frozen=True)
class Launch:
    """The command line, settings file and environment of an `accelerate launch`.

    Attributes:
        flags: values of the flags that are not at their default, by name with underscores.
        file: the settings file that it read; None: it read none.
        settings: the content of that file.
        environment: the environment variables with which it was started.
    """

    flags: Mapping[str, object] = field(default_factory=dict)
    file: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def chose_threads(self) -> bool:
        """Whether the user set OMP_NUM_THREADS, in the environment or by a flag; else the launcher set it by itself."""
        return "OMP_NUM_THREADS" in self.environment or "num_cpu_threads_per_process" in self.flags


def find_launch() -> Launch | None:
    """Return the `accelerate launch` that started this process, directly or through other programs.

    Returns None if there is none, or if its process cannot be inspected, such as one in another container.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # every launch sets it
        return None
    try:
        for process in psutil.Process().parents():
            arguments = _launch_arguments(process.cmdline())
            if arguments is not None:
                return _parse_launch(arguments, process.environ(), Path(process.cwd()))
    except psutil.Error:
        return None
    return None


def _launch_arguments(words: list[str]) -> list[str] | None:
    """Return the arguments after `accelerate launch` in a command line; None for a command line of another program."""
    for i, word in enumerate(words[:8]):
        name = Path(word).name.removesuffix(".exe").removesuffix(".py")
        if name in ("accelerate", "accelerate.commands.accelerate_cli", "accelerate_cli"):
            return words[i + 2 :] if words[i + 1 : i + 2] == ["launch"] else None
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return words[i + 1 :]
    return None


def _parse_launch(arguments: list[str], environment: Mapping[str, str], folder: Path) -> Launch:
    with gc_disabled():  # here: a second of imports
        from accelerate.commands.config.config_args import default_config_file
        from accelerate.commands.launch import launch_command_parser
    parser = launch_command_parser()
    parsed, unasked = (vars(parser.parse_args(words)) for words in (arguments, ["script"]))
    options = unasked.keys() - {"training_script", "training_script_args", "nondefault"}
    flags = {name: parsed[name] for name in sorted(options) if parsed[name] != unasked[name]}
    file = flags.get("config_file") or (None if "cpu" in flags else default_config_file)
    path = None if file is None else folder / file
    if path is None or not path.is_file():
        return Launch(flags, None, {}, environment)
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON too
    return Launch(flags, path, settings if isinstance(settings, dict) else {}, environment)


def launcher_precision(launch: Launch | None, environment: Mapping[str, str]) -> str | None:
    """Return the precision that the user gave to the launcher: "no", "fp16", "bf16" or None for no choice.

    "no" counts as a choice only if it was given by a flag: it is the launcher's default, and a settings file always
    names a precision.

    environment: the variables of this process, in which the launcher sets the precision.
    """
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "").lower()
    by_flag = launch is not None and "mixed_precision" in launch.flags
    return precision if precision in ("fp16", "bf16") or precision == "no" and by_flag else None


def launcher_settings(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the settings given to the launcher: `precision`, see `launcher_precision`, and `compile`, the name of a
    torch.compile backend; None for each that was not given.
    """
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    compile = None if backend in ("", "no") else backend
    return {"precision": launcher_precision(find_launch(), environment), "compile": compile}


def refuse(launch: Launch | None, environment: Mapping[str, str]) -> None:
    """Raise BadInput if the launcher was asked for anything that the scripts do not support; the message lists all.

    environment: the variables of this process, some of which the launcher has set.
    """
    asked: dict[str, list[str]] = {}
    for what, source in (*(_of_launch(launch) if launch is not None else ()), *_of_variables(environment)):
        asked.setdefault(what, []).append(source)
    problems = [
        f"{', '.join(places)}: asks for {what}, which these scripts do not support: they run on one device, or "
        "with one process for each (DDP). Leave it out, or choose another `accelerate config`."
        for what, places in asked.items()
    ]
    problems += [*_counted_twice(launch, environment), *_other_values(environment)]
    if problems:
        raise BadInput(problems)


def _of_launch(launch: Launch) -> Iterator[tuple[str, str]]:
    """Yield (feature asked for, place) for each flag and each entry of the settings file; the flags `--cpu` and
    `--multi_gpu` override the file.
    """
    for name in launch.flags.keys() - INSTEAD.keys():
        if what := _other(name):
            yield what, f"--{name}"
    if launch.flags.keys() & {"cpu", "multi_gpu"}:
        return
    if what := DISTRIBUTED_TYPES.get(str(launch.settings.get("distributed_type")).upper()):
        yield what, f"distributed_type in {launch.file}"
    for name, value in launch.settings.items():
        if value and str(value).lower() not in ("no", "none", "false", "main") and (what := _other(name)):
            yield what, f"{name} in {launch.file}"


def _other(name: str) -> str | None:
    return next((what for what, begins in OTHER_TRAINERS.items() if name.startswith(begins)), None)


def _of_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, what in SWITCHES.items():
        if environment.get(f"ACCELERATE_USE_{name}", "").lower() in _ON:
            yield what, f"ACCELERATE_USE_{name}"
    for name in TPU_VARIABLES:
        if name in environment and (name != "PJRT_DEVICE" or environment[name].upper() == "TPU"):
            yield "TPU", name


def _counted_twice(launch: Launch | None, environment: Mapping[str, str]) -> Iterator[str]:
    for name, flag in INSTEAD.items():
        value = launch.flags.get(name) if launch is not None else None
        if value is not None and (name, value) != ("gradient_accumulation_steps", 1):
            yield f"--{name} {value} of `accelerate launch` is only for DeepSpeed: give the script {flag} {value}."
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("", "1"):
        yield (
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {steps}, which would divide the gradients a second time: unset "
            f"it, and give --optim.accumulation_steps {steps}."
        )


def _other_values(environment: Mapping[str, str]) -> Iterator[str]:
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("", "no", "fp16", "bf16"):
        yield f"ACCELERATE_MIXED_PRECISION is {precision}; expected no, fp16 or bf16."
    for name, usual in COMPILING.items():
        value = environment.get(f"ACCELERATE_DYNAMO_{name}", usual)
        if value.lower() != usual:
            yield (
                f"--dynamo_{name.lower()} of `accelerate launch` (ACCELERATE_DYNAMO_{name} is {value}): the scripts "
                "compile in torch's default mode; leave it out."
            )


@dataclass(frozen=True)
class ResolvedExecution:
    """Precision, TF32 and compilation of a run, and where each choice comes from.

    Attributes:
        precision: "no", "fp16" or "bf16".
        tf32: see `run.tf32`.
        compile: see `optim.compile`, but never None.
        precision_by, compile_by: origin of the choice: a setting, "accelerate launch", "the run so far" (the resumed
            run) or "default".
    """

    precision: str
    precision_by: str
    tf32: bool | None
    compile: bool | str
    compile_by: str

    def __str__(self) -> str:
        tf32 = ", TF32" if self.tf32 else ""
        compiled = f"; torch.compile: {self.compile} ({self.compile_by})"
        precision = "float32" if self.precision == "no" else self.precision
        return f"precision: {precision}{tf32} ({self.precision_by}){'' if self.compile is False else compiled}"


def resolve_execution(
    given: Mapping, launched: Mapping, began: Mapping, auto: Callable[[], tuple[str, bool | None, str]]
) -> ResolvedExecution:
    """Choose precision and compilation, each from the first of settings, launcher and resumed run that sets it; TF32
    from the settings, else from whatever decided the precision.

    Args:
        given: `precision`, `tf32` and `compile` in the settings of this start; None: not set. If `precision` is "auto",
            launcher and resumed run are asked before `auto` is.
        launched, began: values by the same names of the launcher and of the resumed run; a missing one or None: not
            set.
        auto: returns precision, TF32 and a reason for the hardware; called only if `precision` is "auto" and neither
            launcher nor resumed run sets it.
    """
    asked = given["precision"]
    tf32 = given["tf32"]
    precision, by = _first("run.precision", None if asked == "auto" else asked, launched, began)
    if by == "the run so far" and tf32 is None:
        tf32 = began.get("tf32")
    if precision is None and asked == "auto":
        precision, able, why = auto()
        by = f"run.precision auto: {why}"
        tf32 = able if tf32 is None else tf32
    compile, compile_by = _first("optim.compile", given["compile"], launched, began)
    return ResolvedExecution(precision or "no", by, tf32, compile or False, compile_by)


def _first(setting: str, given: object, launched: Mapping, began: Mapping) -> tuple[object, str]:
    key = setting.partition(".")[2]
    by_launcher = launched.get(key)
    before = began.get(key)
    if given is not None:
        unheard = f", not accelerate launch, which says {by_launcher}" if by_launcher not in (None, given) else ""
        return given, f"{setting}{unheard}"
    if by_launcher is not None:
        return by_launcher, "accelerate launch"
    return before, "default" if before is None else "the run so far"
