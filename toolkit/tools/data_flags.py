"""Flags about data for the scripts beside training, under the names that they have in training too."""

import argparse
from pathlib import Path

import yaml

from toolkit.base.files import parse_yaml


def add_data_flag(parser: argparse.ArgumentParser, name: str, **arguments) -> None:
    """Add a flag under both of its names: `--image-dir`, and `--data.image_dir` as in the training commands."""
    key = name.removeprefix("--").replace("-", "_")
    if key == "image_dir":
        arguments["action"] = Folders
    parser.add_argument(name, f"--data.{key}", **arguments)


class Folders(argparse.Action):
    """Values of a flag that may be repeated, each one folder or, as in settings, a list: `[images, more.zip]`."""

    def __call__(self, parser, namespace, values, option_string=None):
        """Append to the list of this flag; end the program with an error message if a list cannot be read."""
        before = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*before, *self._folders(parser, values, option_string)])

    @staticmethod
    def _folders(parser, text: str, option: str | None) -> list[str]:
        if not (text.startswith("[") and text.endswith("]")) or Path(text).exists():
            return [text]
        try:
            return [str(folder) for folder in parse_yaml(text)]
        except yaml.YAMLError:
            parser.error(f"{option} {text}: expected a folder, or a list of folders such as [images, more.zip]")
