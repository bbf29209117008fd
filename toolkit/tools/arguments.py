"""Parses the command lines of the programs other than training: files and flags in any order, flags named as in
training.
"""

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import parse_yaml
from toolkit.base.text import did_you_mean, shown
from toolkit.data.choices import CROWDS, FORMATS
from toolkit.run.synonyms import other_name


class ShortUsage(argparse.RawDescriptionHelpFormatter):
    """A help formatter whose usage line has only the required arguments, and "[options]" for all others.

    Paragraphs of the description are wrapped to the terminal; indented blocks, which are examples, are not changed.
    """

    def _fill_text(self, text, width, indent) -> str:
        blocks = text.strip().split("\n\n")
        return "\n\n".join(block if block.startswith(" ") else textwrap.fill(block, width) for block in blocks)

    def _format_action_invocation(self, action) -> str:
        """Return the names of a flag and then its value once, as Python 3.13 does: `--format, --data.format {a,b}`."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def add_usage(self, usage, actions, groups, prefix=None) -> None:
        must = [action for action in actions if action.required or not action.option_strings]
        options = argparse.Action([], "options", metavar="[options]")
        super().add_usage(
            usage,
            [*must, options] if len(must) < len(actions) else must,
            (),
            prefix,
        )


class Program(argparse.ArgumentParser):
    """An argparse parser that takes positional arguments before, between and after flags.

    Example: `predict.py RUN --trust IMAGES`.

    A flag with `nargs="+"` takes every word up to the next flag. If one of the words is not valid for the flag, or no
    word is left for a required argument, the error message explains this. Use `parse_args` and `parse_known`, not the
    other parsing methods of argparse.
    """

    def __init__(self, description: str | None, **options):
        super().__init__(description=description, formatter_class=ShortUsage, **options)
        self._taken: dict[str, list[str]] = {}  # by flag with `nargs="+"`: the words it took

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """Parse the arguments; print a message and end the program with exit code 2 if they are not valid."""
        parsed, unknown = self.parse_known(args, namespace)
        if unknown:
            self.error("; ".join(self._not_known(unknown)))
        return parsed

    def parse_known(
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the known arguments; return the namespace and the words that are unknown."""
        self._taken = {}
        return self.parse_known_intermixed_args(
            sys.argv[1:] if args is None else list(args),
            namespace,
        )

    def _not_known(self, words: Sequence[str]) -> list[str]:
        """Return a sentence for every unknown flag, with what was probably meant, and for words that follow none."""
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        names = [flag.removeprefix("--") for flag in flags]
        sentences = []
        for word in [word for word in words if word.startswith("-")]:
            flag = word.partition("=")[0]
            hint = other_name(flag, names, prefix="--") or did_you_mean(flag, flags)
            sentences.append(f"{shown(flag)}: no such flag{hint}")
        if sentences:
            return sentences  # the other words may be their values
        return [f"{shown(word)}: not expected here; put quotes around a name with spaces" for word in words]

    def error(self, message: str):
        """Print the usage and the message, and end the program with exit code 2."""
        missing = [name for name in self._names() if name in message]
        for flag, words in self._taken.items() if missing else ():
            message += f". {flag} took {', '.join(words)}: {self._before(flag)}"
        super().error(message)

    def _get_values(self, action, arg_strings):
        if "" in arg_strings:
            raise argparse.ArgumentError(action, "the value is empty. Is a variable of the shell not set?")
        if action.option_strings and action.nargs == "+":
            self._taken["/".join(action.option_strings)] = list(arg_strings)
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if len(arg_strings) < 2 or action.nargs != "+" or not action.option_strings:
                raise
            flag = "/".join(action.option_strings)
            self._taken = {}  # the sentence is complete
            raise argparse.ArgumentError(
                action,
                f"{error.message}. {self._before(flag)}",
            ) from error

    def _before(self, flag: str) -> str:
        return f"{flag} takes every word up to the next flag; put {' and '.join(self._names()) or 'others'} before it"

    def _names(self) -> list[str]:
        """Return the names of the positional arguments, as the usage shows them."""
        actions = (action for action in self._actions if not action.option_strings)
        return [action.metavar or action.dest for action in actions]


MOST = 2**31 - 1  # what libraries take for a count, in 32 bits


def whole_number(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return the `type` of an argument that is a whole number from `least` to `most`, for `add_argument`."""
    expected = "a whole number above 0" if least == 1 else f"a whole number from {least}"
    if most != MOST:
        expected += f", at most {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shown(text) or repr(text)}: expected {expected}")
        return value

    return parse


def finite_number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return the `type` of an argument that is a finite number from `least` to `most`, for `add_argument`."""
    expected = f"a number from {least:g} to {most:g}" if math.isfinite(most) else f"a finite number from {least:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            raise argparse.ArgumentTypeError(f"{shown(text) or repr(text)}: expected {expected}")
        return value

    return parse


def add_data_flag(parser: argparse.ArgumentParser, name: str, **arguments) -> None:
    """Add the flag `name`, such as `--image-dir`, with its name in the training commands, `--data.image_dir`, as alias.

    arguments: those of `add_argument`.
    """
    key = name.removeprefix("--").replace("-", "_")
    if key == "image_dir":
        arguments["action"] = Folders
        arguments["nargs"] = "+"
    parser.add_argument(name, f"--data.{key}", **arguments)


class Folders(argparse.Action):
    """An argparse action for a flag of several words that may be repeated, collected in a list of folders.

    A word is one folder, or a list of folders as in settings files: `[images, more.zip]`.
    """

    def __call__(self, parser, namespace, values, option_string=None):
        """Add the folders in `values` to the list of this flag; end the program with an error if they cannot be parsed.
        """
        folders = list(getattr(namespace, self.dest) or [])
        for text in values:
            folders += self._folders(parser, text, option_string)
        setattr(namespace, self.dest, folders)

    @staticmethod
    def _folders(parser, text: str, option: str | None) -> list[str]:
        if not (text.startswith("[") and text.endswith("]")) or Path(text).exists():
            return [text]
        try:
            return [str(folder) for folder in parse_yaml(text)]
        except yaml.YAMLError:
            parser.error(f"{option} {text}: expected a folder, or a list of folders such as [images, more.zip]")


MAX_DETECTIONS_HELP = "maximum number of detections of an image, over all classes (default: as the run evaluates)"
IMAGE_DIR_HELP = "folder, archive or URL of the images, if not those of the run; may be repeated"
TRUST_HELP = "run the code that files name or are: they are yours, or of someone you trust"
# Flags of the scripts that open trained models, with their arguments for argparse.
MODEL_FLAGS = {
    "--weights": {"choices": ("model", "ema"), "help": "raw or averaged weights of a run"},
    "--split": {"help": "annotation file or split instead of the run's validation data"},
    "--image-dir": {"help": IMAGE_DIR_HELP},
    "--format": {"choices": FORMATS, "help": "how to read other data than the run's (default auto)"},
    "--path": {"help": "folder or hub name of another data set, of which --split is a split"},
    "--max-detections": {"type": whole_number(1), "metavar": "N", "help": MAX_DETECTIONS_HELP},
    "--trust": {"action": "store_true", "help": TRUST_HELP},
}
DATA_FLAGS = ("--image-dir", "--format", "--path")


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags `names` of `MODEL_FLAGS` to a parser; those for data also under their names in training."""
    for name in names:
        if name in DATA_FLAGS:
            add_data_flag(parser, name, **MODEL_FLAGS[name])
        else:
            parser.add_argument(name, **MODEL_FLAGS[name])


def add_reading_flags(parser: argparse.ArgumentParser) -> None:
    """Add the data that are inspected before a training, and the flags that say how they are read."""
    parser.add_argument("source", nargs="+", help="folder, annotation files, or names of splits, as --data.train")
    images = "folder, archive or URL that file names are relative to; may be repeated (default: looked for)"
    add_data_flag(parser, "--image-dir", help=images)
    add_data_flag(parser, "--format", choices=FORMATS, default="auto", help="format of the data; auto recognises it")
    add_data_flag(parser, "--name", help="hub name or folder of `datasets`, as in training")
    faulty = "as --data.on_error in training; with drop, faulty records count as warnings"
    add_data_flag(parser, "--on-error", choices=("raise", "drop"), default="raise", help=faulty)
    depths = "full decodes every image and compares them all; auto does so where no split has more than 20,000 images; "
    depths += "header reads sizes and ends of files; none opens no image"
    parser.add_argument("--check-images", choices=("auto", "full", "header", "none"), default="auto", help=depths)
    add_classes_flag(parser)
    add_data_flag(parser, "--white", type=int, help="value of 16-bit images that becomes white (default: 65535)")
    parser.add_argument("--masks", action="store_true", help="read and check the masks of objects too")
    crowds = "what boxes marked as crowd regions (iscrowd 1) are, as in training: ignored, or objects like all others"
    add_data_flag(parser, "--crowds", choices=CROWDS, default="ignore", help=crowds)
    side = "image size in pixels in training, SIDE or HEIGHT WIDTH (default: that of the settings file in the command)"
    add_data_flag(parser, "--image-size", type=whole_number(1), nargs="+", help=side)


def add_classes_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--classes`, whose value is a mapping in YAML as of the setting `data.classes`."""
    words = "rename, merge or leave out classes as --data.classes in training: '{car: vehicle, tree: null}'"
    add_data_flag(parser, "--classes", metavar="{OLD: NEW}", type=_class_map, default={}, help=words)


def _class_map(text: str) -> dict:
    expected = f"{text!r} is not a mapping of names such as '{{car: vehicle, tree: null}}'"
    try:
        class_map = parse_yaml(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(expected) from error
    if not isinstance(class_map, dict):
        raise argparse.ArgumentTypeError(expected)
    return class_map


def inference_flags(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the arguments `--model.KEY VALUE` and `--head.KEY VALUE` by key, and the other arguments.

    `--head.KEY` is short for `--model.head_options.KEY`. Values are parsed as YAML, as in a settings file.

    Raises:
        BadInput: a flag has no value, or its value is not YAML.
    """
    settings = {}
    rest = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith(("--model.", "--head.")):
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        if value is None:
            raise BadInput(f"{flag}: expected a value")
        key = flag.removeprefix("--").replace("head.", "head_options.", 1).removeprefix("model.")
        try:
            settings[key] = parse_yaml(value)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise BadInput(f"{flag} {shown(value)}: cannot be read as a value of a setting: {reason}") from error
    return settings, rest
