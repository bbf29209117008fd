"""The command line of a program beside training, with positional arguments and flags in any order."""

import argparse
import sys
from collections.abc import Sequence

from toolkit.base.text import ShortUsage


class Program(argparse.ArgumentParser):
    """An argparse parser that takes positional arguments before, between and after flags.

    Example: `predict.py RUN --trust IMAGES`.

    A flag with `nargs="+"` takes every word up to the next flag. If it cannot use one of them, or no word is left for a
    required argument, the error message says so. `parse_args` and `parse_known` replace those of argparse.
    """

    def __init__(self, description: str | None, **options):
        super().__init__(description=description, formatter_class=ShortUsage, **options)
        self._taken: dict[str, list[str]] = {}  # by flag with `nargs="+"`: the words it took

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """Parse all words; end the program with exit code 2 and one sentence if they cannot be used."""
        parsed, unknown = self.parse_known(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed

    def parse_known(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the known words; return the namespace and the other words."""
        self._taken = {}
        return self.parse_known_intermixed_args(sys.argv[1:] if args is None else list(args), namespace)

    def error(self, message: str):
        """End the program with exit code 2, the usage and the message."""
        missing = [name for name in self._names() if name in message]
        for flag, words in self._taken.items() if missing else ():
            message += f". {flag} took {', '.join(words)}: {self._before(flag)}"
        super().error(message)

    def _get_values(self, action, arg_strings):
        if action.option_strings and action.nargs == "+":
            self._taken["/".join(action.option_strings)] = list(arg_strings)
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if len(arg_strings) < 2 or action.nargs != "+" or not action.option_strings:
                raise
            flag = "/".join(action.option_strings)
            self._taken = {}  # the sentence is complete
            raise argparse.ArgumentError(action, f"{error.message}. {self._before(flag)}") from error

    def _before(self, flag: str) -> str:
        return f"{flag} takes every word up to the next flag; put {' and '.join(self._names()) or 'others'} before it"

    def _names(self) -> list[str]:
        """Return the names of the positional arguments, as the usage shows them."""
        actions = (action for action in self._actions if not action.option_strings)
        return [action.metavar or action.dest for action in actions]
