"""Opens a detector and its data, and writes and checks its files; `scripts/export.py` parses the flags."""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.data.pipeline import processor_size, tiling_of_run
from toolkit.data.splits import open_split
from toolkit.data.tile_table import tiles_of_table
from toolkit.models import options_class
from toolkit.run.open_run import run_folder_of
from toolkit.run.settings_file import load_config_dict
from toolkit.tools.export.judge import graphs_as_table, results_as_table, write_and_check, write_relations
from toolkit.tools.export.request import ExportRequest
from toolkit.tools.export.write import check_exportable
from toolkit.tools.predict.open import OwnDetector, open_own_detector, report_thresholds
from toolkit.tools.predict.predict_split import SplitOptions, split_arguments


def export(arguments: argparse.Namespace) -> bool:
    """Write and check all files, and print a table. Return whether all files are as good as PyTorch."""
    trained = opened(arguments)
    table = validation_table(arguments)
    out = arguments.out
    if arguments.score_threshold is None:
        recommended = report_thresholds(Path(arguments.model).expanduser()) or {}
        arguments.score_threshold = recommended.get("", ExportRequest.score_threshold)
    request = ExportRequest(**{field.name: getattr(arguments, field.name) for field in fields(ExportRequest)})
    lines, problems = write_and_check(trained, table, out, request)
    graphs = write_relations(trained, table, out, request, problems)
    for file, problem in problems.items():
        print(f"{out / file}: {problem}; it is now {file}.wrong", file=sys.stderr)
    content = {"source": trained.source, "files": [asdict(line) for line in lines], "graphs": graphs}
    (out / "export.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(results_as_table(lines))
    if graphs:
        print(f"\n{graphs_as_table(graphs)}")
    if table is None:
        print("no validation data is known: AP was not compared; give them with --split FILE --image-dir FOLDER")
    return not problems


def opened(arguments: argparse.Namespace) -> OwnDetector:
    """Open the detector to export. Raises BadInput for one that cannot be exported."""
    path = Path(arguments.model).expanduser()
    trained = open_own_detector(path, arguments.weights, arguments.settings)
    if trained is None and (path.parent / "config.yaml").is_file():  # the folder for transformers inside a run
        trained = open_own_detector(path.parent, settings=arguments.settings)
    if trained is None:
        raise BadInput(f"{arguments.model}: a model of transformers; give the run that it is of, or a checkpoint")
    check_exportable(trained.detector)
    size = arguments.size and dict(zip(("height", "width"), arguments.size, strict=True))
    return trained._replace(size=size) if size else trained


def validation_table(arguments: argparse.Namespace):
    """Open the data on which the exported files are evaluated; None if no data are known.

    For a run that was trained on tiles (`data.tile`) these are the tiles, which are what the files get.
    """
    try:
        folder = run_folder_of(Path(arguments.model).expanduser())
    except BadInput:
        folder = None
    config = None
    if folder is not None:
        config = load_config_dict(folder / "config.yaml", options_class, needed=("model", "data"))
    if arguments.split is not None:
        data = {} if config is None else config["data"]
        as_trained = {"classes": data.get("classes", {}), "white": data.get("white")}
        reading = {"image_dir": arguments.image_dir, "format": arguments.format, **as_trained}
        return open_split(arguments.split, say=print, **reading)
    if config is None:
        return None
    table = open_split(**split_arguments(config, SplitOptions()), say=print)
    data = config["data"]
    tiling = tiling_of_run(data, processor_size(data["image_size"], data["scales"], data["max_size"]))
    if tiling is None:
        return table
    tiles = tiles_of_table(table, tiling)
    print(f"the files are compared on tiles, and AP is that of tiles, not of pictures: {tiles}")
    return tiles
