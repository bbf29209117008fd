"""Detect objects in images and videos with a trained detector; write the detections, and pictures with boxes.

    python scripts/predict.py runs/detr photo.jpg holiday/ --out found      # a run: its best weights
    python scripts/predict.py runs/detr/final 'holiday/**/*.jpg' --out found --score-threshold 0.5
    python scripts/predict.py runs/detr/checkpoints/latest photo.jpg --out found --weights model
    python scripts/predict.py exported/model.onnx film.mp4 --out found      # an exported file; a video
    python scripts/predict.py facebook/detr-resnet-50 holiday/ --out found  # a model of the hub
    python scripts/predict.py runs/detr map.png --out found --tile 640 --overlap 0.2
    ls photos/*.jpg | python scripts/predict.py runs/detr - --out found --format coco csv
    python scripts/predict.py runs/detr unlabelled/ --out next --uncertain 100   # the images to label next
    python scripts/predict.py runs/detr --camera 0 --max-frames 300 --out found
    python scripts/predict.py runs/yolov3 holiday/ --out found --model.nms_threshold 0.6
    python scripts/predict.py runs/sgdet holiday/ --out found --format json dot --all-scores
    python scripts/predict.py runs/causal holiday/ --out found --boxes boxes.json --head.effect tde

IMAGES are files, folders (searched recursively), quoted patterns, URLs and videos. `found/predictions.json` has

    {"model": ..., "score_threshold": 0.3, "categories": [{"id": 7, "name": "platelet"}, ...],
     "images": [{"id": 1, "file_name": "holiday/a.jpg", "width": 640, "height": 480,
                 "picture": "pictures/a.jpg",
                 "detections": [{"category_id": 7, "category": "platelet", "score": 0.93,
                                 "bbox": [x, y, width, height]}, ...]}, ...],
     "errors": [{"file_name": "holiday/b.jpg", "error": "image data truncated"}, ...]}

with the ids and names of the training data and boxes in pixels of the upright image, best first. A detector of masks
adds "segmentation" to each detection: COCO's run lengths, or with --polygons the polygons. A scene-graph detector
(sgdet) adds "relations": [{"subject": i, "object": j, "predicate": "on", "score": 0.61}, ...] for each image, the 100
best, where i and j are positions in its detections. Pictures show the best relations as arrows (--relations,
--relation-score) and say how many are not drawn. A model of predcls or sgcls needs the boxes of a COCO file (--boxes).
--format dot and networkx write each graph into `found/graphs/`. A video gives `found/videos/NAME.jsonl`, one line per
frame, and NAME.mp4 with the boxes.

Exit code 0: all done; 1: some files could not be read, they are listed and the others are done; 2: bad input.
"""

import argparse
import math
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from toolkit.base.distributed import default_device, usable_device
from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.base.files import distinct
from toolkit.base.imports import trust_files
from toolkit.base.text import shown
from toolkit.data.annotations import ImageRow
from toolkit.data.table import LabelledImages
from toolkit.data.tiles import MAX_OVERLAP
from toolkit.detectors.scene_graphs.formats import GRAPH_SUFFIXES, without_graph_constraint
from toolkit.detectors.scene_graphs.graph_pictures import draw_found
from toolkit.evaluation.predictions import joined
from toolkit.tools.arguments import Program, finite_number, inference_flags, whole_number
from toolkit.tools.predict.image_files import find_or_fetch, given_boxes, image_ids_of, predict_files
from toolkit.tools.predict.open import add_flags, open_predictor
from toolkit.tools.predict.outputs import (
    OUTPUT_FORMATS,
    WITHOUT_MASKS,
    check_output_folder,
    clear_outputs,
    images_root,
    names_of_outputs,
    write_outputs,
)
from toolkit.tools.predict.prediction import DEFAULT_THRESHOLD, Predictor, from_report, of_classes, smallest_threshold
from toolkit.tools.predict.tiles import chosen_tiling, data_settings_of, flipped, tiled_as
from toolkit.tools.predict.uncertain import most_uncertain, write_uncertain
from toolkit.tools.predict.video import VIDEO_SUFFIXES, predict_video


def predict(arguments: argparse.Namespace) -> int:
    """Predict on all images, videos and the camera of `arguments`, write the results, and return the exit code: 1 if
    some could not be read, else 0."""
    arguments.device = usable_device(arguments.device)
    videos = [Path(source).expanduser() for source in arguments.images if Path(source).suffix.lower() in VIDEO_SUFFIXES]
    rest = [source for source in arguments.images if Path(source).expanduser() not in videos]
    names, errors, fetched = find_or_fetch(rest, arguments.out) if rest else ({}, {}, set())
    if not (names or errors or videos or arguments.camera is not None):
        missing = "no images: give files, folders, patterns, videos, or --camera 0"
        if arguments.classes:
            missing += f". --classes took {', '.join(arguments.classes)}: put the images before it"
        raise BadInput(missing)
    check_output_folder(arguments.out, [*names, *videos], arguments.overwrite)
    named = names_of_outputs(names, fetched, arguments.format)
    ids = dict(zip(names, image_ids_of(arguments.image_ids, list(names)), strict=True))
    predictor = chosen_predictor(arguments)
    check_given(arguments, predictor, videos)
    if arguments.uncertain is not None:
        chosen = most_uncertain(predictor, list(names), arguments.uncertain, arguments.batch_size)
        names = {path: names[path] for path in names if path in chosen}
    predictor, threshold = with_threshold(predictor, arguments.score_threshold)
    given = given_boxes(arguments.boxes, names, predictor.class_names) if arguments.boxes else None
    try:
        clear_outputs(arguments.out)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {arguments.out}: cannot be written: {error.strerror}") from error
    if arguments.uncertain is not None:
        write_uncertain(chosen, arguments.out / "uncertain.csv")
    document, labelled, failed = predict_and_draw(arguments, predictor, threshold, names, ids, given)
    errors |= failed
    for source in [*videos, *([arguments.camera] if arguments.camera is not None else [])]:
        error = one_video(arguments, predictor, threshold, source)
        if error:
            errors[source] = error
    if names or errors:
        document["errors"] = [{"file_name": str(path), "error": reason} for path, reason in errors.items()]
        kept = [named[path] for path in names if path not in errors]
        changes = write_outputs(document, labelled, kept, arguments.format, arguments.out)
        print("\n".join([prediction_summary(document, arguments.out), *changes]))
        for name in WITHOUT_MASKS:
            if name in arguments.format and "masks" in labelled.boxes.extra:
                print(f"{name} has only the boxes: it cannot hold the masks")
        if "coco" in arguments.format and labelled.images:
            print(f"to train on: --data.train {arguments.out}/dataset.json --data.image_dir {images_root(labelled)}")
    return 1 if errors else 0


def chosen_predictor(arguments: argparse.Namespace) -> Predictor:
    """Open the model of `arguments` as a predictor with all of its options applied except the score threshold."""
    predictor = open_predictor(
        arguments.model, arguments.weights, arguments.device, arguments.settings, arguments.max_detections
    )
    if arguments.flip:
        predictor = flipped(predictor)
    trained = data_settings_of(arguments.model)
    tiling = chosen_tiling(arguments.tile, arguments.overlap, trained, predictor.size)
    if tiling is not None:
        predictor = tiled_as(predictor, tiling.tile_hw, tiling.overlap, batch_size=arguments.batch_size)
    return of_classes(predictor, arguments.classes) if arguments.classes else predictor


def with_threshold(predictor: Predictor, threshold: float | str) -> tuple[Predictor, float]:
    """Return a predictor and the smallest score to predict with. For the threshold "auto", the predictor also applies
    the thresholds that the report recommends for each class."""
    if threshold == "auto":
        return from_report(predictor), smallest_threshold(predictor)
    return predictor, float(threshold)


def check_given(arguments: argparse.Namespace, predictor: Predictor, videos: list[Path]) -> None:
    """Check the options on given boxes, masks and graphs. Raises BadInput for options that the model cannot use, and if
    it needs boxes that are not given."""
    if predictor.given and (arguments.boxes is None or videos or arguments.camera is not None):
        mode = {"boxes": "sgcls"}.get(predictor.given, "predcls")
        raise BadInput(
            f"{predictor.source} is a {mode} model: it needs {predictor.given} of images that are given. Pass --boxes "
            "FILE.json with pictures, or train with --model.mode sgdet, which finds its own."
        )
    if arguments.boxes and not predictor.given:
        raise BadInput(f"--boxes {arguments.boxes}: {predictor.source} finds boxes by itself; leave it out")
    if arguments.polygons and not predictor.masks:
        raise BadInput(f"--polygons: {predictor.source} finds boxes, not masks; leave it out")
    flags = ["--all-scores"] * arguments.all_scores
    flags += [f"--format {name}" for name in arguments.format if name in GRAPH_SUFFIXES]
    flags += ["--no-graph-constraint"] * arguments.no_graph_constraint
    if flags and not predictor.predicates:
        raise BadInput(f"{flags[0]} is for scene graphs, and {predictor.source} finds none; see scripts/train_sgg.py")


def predict_and_draw(
    arguments, predictor: Predictor, threshold: float, names, ids, given
) -> tuple[dict, LabelledImages, dict[Path, str]]:
    """Predict on all image files and draw pictures. Return the content of predictions.json, the images with their boxes
    as columns, and the errors of unreadable files.

    Args:
        names: the image files, and the name of each in the output.
        ids: id of each file in the output.
        given: boxes by file, for models that need them; None for others.
    """
    pictures = {} if arguments.no_pictures else picture_names(names)
    options = {"batch_size": arguments.batch_size, "score_threshold": threshold, "given": given}
    predictions = predict_files(predictor, list(names), **options)
    entries = {}
    detections = {}
    errors = {}
    for prediction in tqdm(predictions, "prediction", len(names), unit="image", disable=None):
        path = prediction.path
        if prediction.error is not None:
            tqdm.write(f"{shown(path, 300)}: {prediction.error}", file=sys.stderr)
            errors[path] = prediction.error
            continue
        height, width = prediction.image.shape[-2:]
        entry = {"id": ids[path], "file_name": str(path), "width": width, "height": height}
        how = {"graph_constraint": not arguments.no_graph_constraint, "polygons": arguments.polygons}
        entry |= predictor.as_json(prediction.found, arguments.all_scores, **how)
        detections[path] = prediction.found
        entries[path] = entry
        if pictures:
            entry["picture"] = str(pictures[path])
            drawn = arguments.out / pictures[path]
            listed = without_graph_constraint(prediction.found) if arguments.no_graph_constraint else prediction.found
            what = predictor.class_names, predictor.predicates, drawn, arguments.relations, arguments.relation_score
            draw_found(prediction.image, listed, *what)
    read = [path for path in names if path in entries]
    document = {
        "model": predictor.source,
        "score_threshold": arguments.score_threshold if arguments.score_threshold == "auto" else threshold,
        "categories": [asdict(category) for category in predictor.categories],
        "images": [entries[path] for path in read],
    }
    rows = [ImageRow(*(image[key] for key in ("id", "file_name", "width", "height"))) for image in document["images"]]
    boxes = joined([detections[path] for path in read], [row.image_id for row in rows])
    failed = {path: errors[path] for path in names if path in errors}
    return document, LabelledImages(rows, boxes, predictor.categories), failed


def one_video(arguments, predictor: Predictor, threshold: float, source: Path | int) -> str | None:
    """Predict on a video, or on the camera with the number `source`, and print a summary. Return the reason if it ended
    early, else None."""
    name = f"camera_{source}" if isinstance(source, int) else source.name
    lines = arguments.out / "videos" / f"{name}.jsonl"
    number = 1
    while lines.exists():
        number += 1
        lines = lines.with_name(f"{name}_{number}.jsonl")
    drawn = None if arguments.no_pictures else lines.with_suffix(".mp4")
    with tqdm(desc=name, unit="frame", disable=None) as bar:
        options = {"batch_size": arguments.batch_size, "max_frames": arguments.max_frames, "on_frame": bar.update}
        frames, broken = predict_video(predictor, source, lines, drawn, score_threshold=threshold, **options)
    print(f"{name}: {frames} frames; written: {lines}" + (f", {drawn}" if drawn else ""))
    return broken


def picture_names(names: dict[Path, Path]) -> dict[Path, Path]:
    """Return the path of each file's picture, relative to the output folder. Pictures that would have the same name get
    a number.

    names: the image files, and the name of each in the output.
    """
    suffixes = [name.suffix if name.suffix.lower() in (".jpg", ".jpeg") else ".png" for name in names.values()]
    pictures = [name.with_suffix(suffix).as_posix() for name, suffix in zip(names.values(), suffixes, strict=True)]
    return {path: Path("pictures") / name for path, name in zip(names, distinct(pictures), strict=True)}


def prediction_summary(document: dict, out: Path) -> str:
    counts = Counter(detection["category"] for image in document["images"] for detection in image["detections"])
    by_class = ", ".join(f"{count} {shown(name, 40)}" for name, count in counts.most_common())
    lines = [
        f"{document['model']}: {len(document['images'])} images, {counts.total()} detections of score above "
        f"{document['score_threshold']}" + (f" ({by_class})" if by_class else ""),
        f"written: {out}",
    ]
    if document["errors"]:
        lines.append(f'{len(document["errors"])} files could not be read; they are listed there under "errors"')
    return "\n".join(lines)


def score_or_auto(text: str) -> float | str:
    """Return the value of --score-threshold."""
    if text == "auto":
        return text
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 1:
        hint = f" (did you mean {score / 100:g}?)" if 2 <= score <= 100 else ""
        raise argparse.ArgumentTypeError(f"{shown(text)}: expected a number from 0 to 1, or auto{hint}")
    return score


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = Program(__doc__)
    kinds = "run, checkpoint, final/ folder, .onnx, .pt2, .xml, .pth of Scene-Graph-Benchmark, or model of transformers"
    parser.add_argument("model", help=kinds)
    images = "files, folders, quoted patterns, URLs, videos; - reads a list"
    parser.add_argument("images", nargs="*", default=[], help=images)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier prediction in that folder")
    parser.add_argument(
        "--format", nargs="+", choices=OUTPUT_FORMATS, default=["json"], help="files to write (default json)"
    )
    outlines = "write masks in predictions.json as polygons around their pixels, not as run lengths"
    parser.add_argument("--polygons", action="store_true", help=outlines)
    parser.add_argument("--boxes", type=Path, metavar="FILE", help="COCO file with the given boxes of a graph model")
    parser.add_argument("--all-scores", action="store_true", help="write the scores of all predicates of each pair")
    free = "keep the 100 best (pair, predicate) combinations, not one predicate per pair"
    parser.add_argument("--no-graph-constraint", action="store_true", help=free)
    most = "relations drawn in a picture, at most (default 20)"
    parser.add_argument("--relations", type=whole_number(0), default=20, help=most)
    least = "minimum score of a drawn relation (default 0.0); the files list the 100 best in any case"
    parser.add_argument("--relation-score", type=finite_number(0, 1), default=0.0, help=least)
    parser.add_argument("--image-ids", type=Path, help="COCO file to take image ids from (default: 1, 2, 3, ...)")
    add_flags(parser, "--weights", "--max-detections", "--trust")
    least = "minimum score (default 0.3); auto: thresholds of the report"
    parser.add_argument("--score-threshold", "--threshold", type=score_or_auto, default=DEFAULT_THRESHOLD, help=least)
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="keep only these classes")
    tile = "predict large images in tiles of this longer side (default: as the run was trained; 0: whole images)"
    parser.add_argument("--tile", type=whole_number(0), metavar="PIXELS", help=tile)
    overlap = "fraction by which tiles overlap (default: as the run was trained, else 0.2)"
    parser.add_argument("--overlap", type=finite_number(0, MAX_OVERLAP), help=overlap)
    parser.add_argument("--flip", action="store_true", help="also predict the mirrored image, and merge (TTA)")
    most = "write only the NUMBER images most worth labelling next, in the order of uncertain.csv"
    parser.add_argument("--uncertain", type=whole_number(1), metavar="NUMBER", help=most)
    parser.add_argument("--camera", type=whole_number(0), metavar="NUMBER", help="number of a camera of this machine")
    parser.add_argument("--max-frames", type=whole_number(1), help="stop a video or camera after so many frames")
    parser.add_argument("--batch-size", type=whole_number(1), default=8, help="images per batch (default 8)")
    parser.add_argument("--no-pictures", action="store_true", help="write no pictures and no videos")
    parser.add_argument("--device", default=default_device(), help="cpu, cuda:1, mps, … (default: the GPU, if any)")
    settings, rest = inference_flags(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(rest)
    arguments.settings = settings
    trust_files(arguments.trust)
    return predict(arguments)


if __name__ == "__main__":
    sys.exit(main())
