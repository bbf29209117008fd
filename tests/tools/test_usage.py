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


def test_a_flag_of_two_names_shows_its_value_once():
    parser = argparse.ArgumentParser("predict.py", formatter_class=ShortUsage)
    parser.add_argument("--format", "--data.format", choices=("auto", "coco"))
    parser.add_argument("--flip", action="store_true")
    text = parser.format_help()
    assert "  --format, --data.format {auto,coco}\n" in text
    assert "  --flip\n" in text
