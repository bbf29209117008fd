"""The usage of a program is one line, however many flags it has."""

import argparse

from toolkit.tools.arguments import ShortUsage


def test_the_usage_of_a_script_is_one_line():
    parser = argparse.ArgumentParser("predict.py", formatter_class=ShortUsage)
    parser.add_argument("model")
    parser.add_argument("images", nargs="*")
    parser.add_argument("--out", required=True)
    for number in range(30):
        parser.add_argument(f"--flag-{number}")
    assert parser.format_usage() == "usage: predict.py --out OUT model [images ...] [options]\n"
    assert "--flag-29 FLAG_29" in parser.format_help()
