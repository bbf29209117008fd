"""Reads data, inspects them and reports; `scripts/check_data.py` parses the flags."""

import argparse
import dataclasses
import importlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import parse_yaml
from toolkit.data.check_files import choose_check_depth
from toolkit.data.classes import check_class_map, class_map_of, describe_class_map, written_class_map
from toolkit.data.formats import MAX_UNUSED_NAMED, open_dataset, recognise
from toolkit.data.pipeline import processor_size
from toolkit.data.problem_lines import EXAMPLES, MAX_OF_A_KIND, grouped
from toolkit.data.table import DetectionTable
from toolkit.run.settings import DataConfig
from toolkit.tools.doctor.choices import TRAINING
from toolkit.tools.doctor.inspection import Finding, Inspection, clean_copy, inspect_tables, query_notes
from toolkit.tools.doctor.mask_advice import all_have_masks, few_enough
from toolkit.tools.doctor.tile_advice import nominal_hw
from toolkit.tools.doctor.training_command import WITH_MASKS, Source, command_for, recipe_for, size_of_recipe, tile_of

HEADINGS = {"error": "ERRORS (records that cannot be used)", "warning": "WARNINGS", "note": "NOTES"}
MAX_OF_A_GROUP = 4  # images of a group that look alike, on the console
CHECK_IMAGES = {"auto": True, "none": False}  # values for the readers


def check_data(options: argparse.Namespace) -> int:
    """Read and inspect the data of `options`, print the report, and return the exit code.

    The code is 0 if nothing is wrong, 1 for warnings, 2 for errors. Raises BadInput for data that cannot be read.
    """
    if len(options.image_size or []) == 1:
        options.image_size = options.image_size[0]
    logging.disable(logging.WARNING)  # the summary of warnings is in the report
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # read when `datasets` is imported
    if options.fix and options.fix.exists() and (not options.fix.is_dir() or any(options.fix.iterdir())):
        raise BadInput(f"--fix {options.fix}: not an empty folder; give a new one")
    options.check_images = CHECK_IMAGES.get(options.check_images, options.check_images)
    tables, sources = open_all(options)
    found_masks = objects_have_masks(options, tables)
    options.masks |= found_masks
    program, recipe, _ = recipe_for(WITH_MASKS if options.masks else options.script)
    size = processor_size(options.image_size, [], 0) if options.image_size else size_of_recipe(recipe)
    decoded = all(choose_check_depth(options.check_images, len(table), table.name)[0] for table in tables.values())
    inspection = inspect_tables(tables, size, compare=decoded)
    if Path(program).stem == "train_detr":
        inspection.findings += query_notes(inspection.splits)
    if found_masks:
        message = "all objects have masks, which the command below trains too; --masks checks them"
        inspection.findings.append(Finding("note", "masks", message))
    print(report(tables, inspection))
    first = next(iter(tables.values()))
    if options.anchors:
        from toolkit.tools.anchors import anchors_report  # here: it imports the detectors

        print(anchors_report(first, nominal_hw(size), per_level=3, seed=0))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(inspection.to_json(), encoding="utf-8")
    if options.pictures:
        from toolkit.tools.doctor.pictures import draw_data  # here: it imports matplotlib

        print(f"pictures: {len(draw_data(tables, size, options.pictures))} in {options.pictures}")
    if options.augment:
        file = (options.pictures or Path("found")) / "augmented.jpg"
        print(f"pictures: {draw_augmented(options.augment, options.script, first, file)}")
    if options.fix:
        log = clean_copy(tables, inspection, options.fix)
        print(f"{options.fix}: written, with {len(log)} changes, listed in {options.fix / 'changes.txt'}")
    print(f"\n{training_command(options, sources, tables, inspection, size)}")
    records = any(finding.severity == "error" and finding.kind != "record" for finding in inspection.findings)
    return 1 if inspection.exit_code == 2 and options.on_error == "drop" and not records else inspection.exit_code


def open_all(
    options: argparse.Namespace, say: Callable[[str], None] = print, **other
) -> tuple[dict[str, DetectionTable], list[Source]]:
    """Open every split that the options ask for. Return the tables by name, a different one for each split, and the
    sources that were given.

    say: called with a text on each folder that was recognised. other: options of `open_dataset` that replace those
    given.
    """
    keys = ("image_dir", "format", "name", "check_images", "classes", "masks", "crowds", "white")
    reading = {key: getattr(options, key) for key in keys}
    reading["on_error"] = "drop"
    reading |= other
    reading["classes_must_exist"] = False  # a split may lack a class; all splits together are checked below
    tables: dict[str, DetectionTable] = {}
    sources = []
    for given in dict.fromkeys(options.source):
        if options.name is not None or not Path(given).expanduser().is_dir():
            source = Source(given)
            opened = {source.split or Path(given).stem: open_dataset(given, **reading)}
        else:
            layout = recognise(given, options.format)
            say(str(layout))
            if len(layout.unused) > MAX_UNUSED_NAMED:
                say(f"all {len(layout.unused)} that are not used: {', '.join(layout.unused)}")
            source = Source(given, layout.splits)
            names = [name for name in layout.splits if name != "trainval" or "train" not in layout.splits]
            opened = {name: open_dataset(name, path=given, **reading) for name in names}
        sources.append(source)
        for name, table in opened.items():
            tables[name if name not in tables else f"{given} ({name})"] = table
    as_read = [table.before_classes or table for table in tables.values()]
    listed = dict.fromkeys(name for table in as_read for name in table.class_names)
    check_class_map(class_map_of(options.classes), list(listed), " and ".join(options.source))
    return tables, sources


def report(tables: dict[str, DetectionTable], inspection: Inspection) -> str:
    """Return the text of the report: the findings by severity, followed by a summary of the data that can be used."""
    lines = []
    for severity, heading in HEADINGS.items():
        findings = [finding for finding in inspection.findings if finding.severity == severity]
        if findings:
            count = sum(len(finding.items) if finding.kind == "record" else 1 for finding in findings)
            lines += [f"{heading}: {count}", *(line for finding in findings for line in _lines_of(finding)), ""]
    for split, table in tables.items():
        summary = inspection.splits[split]
        lines.append(
            f"{table.name}: {len(table)} usable images ({summary.background} without objects), {summary.boxes} "
            f"boxes, {summary.crowds} crowd regions, {len(table.categories)} classes"
        )
        if table.class_map:
            lines.append(f"data.classes: {describe_class_map(table.class_map)}")
        width = max(map(len, ["class", *summary.classes]))
        lines.append(f"{'class':{width}}  {'id':>8}  {'boxes':>8}  {'images':>8}")
        for category in table.categories:
            counts = summary.classes[category.name]
            lines.append(f"{category.name:{width}}  {category.id!s:>8}  {counts['boxes']:>8}  {counts['images']:>8}")
        if table.predicates:
            lines.append(f"relations: {', '.join(table.predicates)}")
        if table.attributes:
            lines.append(f"attributes: {', '.join(table.attributes)}")
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def _lines_of(finding: Finding) -> list[str]:
    """Return the message of a finding and its items; for records only the items, and one line for many of a kind."""
    items = list(map(_item, finding.items))
    if finding.kind == "record":
        return [f"  {line}" for line in grouped(items, finding.kinds, "--json lists all")]
    lines = [f"  {finding.message}"]
    if finding.kind not in ("small boxes", "unused classes", "missing classes", "balance", "classes", "tiles"):
        shown = items if len(items) <= MAX_OF_A_KIND else items[:EXAMPLES]
        lines += [f"    {item}" for item in shown]
        if len(shown) < len(items):
            lines.append(f"    and {len(items) - len(shown)} more; --json lists all")
    return lines


def data_settings(config: str, script: str | None = None):
    """Return the group `data` of a settings file; settings that are not in the file have the defaults of its training
    script.

    script: name of the training script; None: the script named first in the file, as in the first line of this
    project's configurations. The config.yaml of a run has every value and needs no script. Raises BadInput for a file
    that cannot be read or names no script.
    """
    try:
        text = Path(config).read_text(encoding="utf-8")
        values = (parse_yaml(text) or {}).get("data", {})
        script_name = script or next(iter(re.findall(rf"\b({'|'.join(TRAINING)})\.py", text)), None)
        if script_name is None and "recipe" not in values:
            raise BadInput(
                f"--augment {config}: the file names no training script, whose defaults decide the recipe; "
                "say it: --script train_detr"
            )
        base = DataConfig() if "recipe" in values else importlib.import_module(script_name).Config().data
        return dataclasses.replace(base, **values)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, AttributeError) as error:
        expected = "expected a settings file of training with a group `data`"
        raise BadInput(f"--augment {config}: {expected}: {error}") from error


def draw_augmented(config: str, script: str | None, table: DetectionTable, file: Path) -> Path:
    """Draw a batch of at most 16 images of a table, with their boxes, after the training augmentation of a settings
    file. The picture is written to `file`; return its path.

    config, script: see `data_settings`.
    """
    from toolkit.data.pipeline import loader_of_settings
    from toolkit.tools.doctor.pictures import draw_batch

    settings = data_settings(config, script)
    settings.workers = 0
    settings.batch_size_per_device = min(16, len(table))
    _, loader = loader_of_settings(table, settings, seed=0, stride=1)
    return draw_batch(next(iter(loader)), table.class_names, file)


def training_command(
    options: argparse.Namespace,
    sources: list[Source],
    tables: dict[str, DetectionTable],
    inspection: Inspection,
    size: Mapping[str, int],
) -> str:
    """Return the command that trains on these data with the options given, or a sentence on why there is no such
    command."""
    if options.script == "train_sgg" and not any(table.predicates for table in tables.values()):
        return "train_sgg needs relations, and these data have none; docs/scene_graph_data.md says how they are written"
    reading = {"name": options.name, "image_size": options.image_size, "white": options.white}
    reading["format"] = None if options.format == "auto" else options.format
    reading["on_error"] = None if options.on_error == "raise" else options.on_error
    reading["crowds"] = None if options.crowds == "ignore" else options.crowds
    reading["image_dir"] = options.image_dir and f"[{', '.join(options.image_dir)}]"
    reading["classes"] = written_class_map(options.classes) if options.classes else None
    return command_for(sources, inspection, reading, options.script, options.masks, tile_of(inspection, size))


def objects_have_masks(options: argparse.Namespace, tables: dict[str, DetectionTable]) -> bool:
    """Return whether all objects have masks that a training could use, though `--masks` was not given."""
    if options.masks or options.script not in (None, WITH_MASKS) or not few_enough(tables.values()):
        return False
    try:
        masked, _ = open_all(options, lambda text: None, masks=True, check_images=False)
    except BadInput:  # the format, or the data, have none
        return False
    return all_have_masks(list(masked.values()), list(tables.values()))


def _item(item: object) -> str:
    if isinstance(item, dict):
        return ", ".join(f"{key} {value}" for key, value in item.items())
    if not isinstance(item, list):
        return str(item)
    shown = item if len(item) <= MAX_OF_A_GROUP else [*item[:MAX_OF_A_GROUP], f"{len(item) - MAX_OF_A_GROUP} more"]
    return " = ".join(shown)
