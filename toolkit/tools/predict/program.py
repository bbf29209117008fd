"""Predicts on images, videos and a camera, and writes the results; `scripts/predict.py` parses the flags."""

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from toolkit.base.distributed import default_device, usable_device
from toolkit.base.errors import BadInput
from toolkit.base.files import distinct
from toolkit.base.text import shown
from toolkit.data.annotations import ImageRow
from toolkit.data.table import LabelledImages
from toolkit.detectors.scene_graphs.formats import without_graph_constraint
from toolkit.detectors.scene_graphs.graph_pictures import draw_found
from toolkit.evaluation.predictions import joined
from toolkit.tools.predict.choices import GRAPH_SUFFIXES
from toolkit.tools.predict.image_files import find_or_fetch, given_boxes, image_ids_of
from toolkit.tools.predict.in_tiles import chosen_tiling, data_settings_of, flipped, in_tiles
from toolkit.tools.predict.open import open_predictor
from toolkit.tools.predict.outputs import (
    WITHOUT_MASKS,
    check_output_folder,
    clear_outputs,
    images_root,
    names_of_outputs,
    outputs_in,
    served_root,
    write_outputs,
)
from toolkit.tools.predict.predict_each import predict_files
from toolkit.tools.predict.predictor import Predictor, from_report, of_classes, smallest_threshold
from toolkit.tools.predict.uncertain import most_uncertain, write_uncertain
from toolkit.tools.predict.video import VIDEO_SUFFIXES, predict_video


def predict(arguments: argparse.Namespace) -> int:
    """Predict on all images, videos and the camera of `arguments`, write the results, and return the exit code: 1 if
    some could not be read, else 0."""
    device = default_device() if arguments.device is None else arguments.device
    arguments.device = usable_device(device)
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
        if "label_studio" in arguments.format and labelled.images:
            print(f"for Label Studio: LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={served_root(labelled)}")
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
        predictor = in_tiles(predictor, tiling, batch_size=arguments.batch_size)
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
    notes: Counter[str] = Counter()
    for prediction in tqdm(predictions, "prediction", len(names), unit="image", disable=None):
        path = prediction.key
        found = prediction.detections
        if prediction.error is not None:
            errors[path] = prediction.error.reason
            tqdm.write(f"{shown(path, 300)}: {errors[path]}", file=sys.stderr)
            continue
        notes.update(prediction.notes)
        height, width = prediction.image.shape[-2:]
        entry = {"id": ids[path], "file_name": str(path), "width": width, "height": height}
        how = {"graph_constraint": not arguments.no_graph_constraint, "polygons": arguments.polygons}
        entry |= predictor.as_json(found, arguments.all_scores, **how)
        detections[path] = found
        entries[path] = entry
        if pictures:
            entry["picture"] = str(pictures[path])
            drawn = arguments.out / pictures[path]
            listed = without_graph_constraint(found) if arguments.no_graph_constraint else found
            what = predictor.class_names, predictor.predicates, drawn, arguments.relations, arguments.relation_score
            draw_found(prediction.image, listed, *what)
    read = [path for path in names if path in entries]
    for note, count in notes.items():
        print(f"{count} of {len(read)} images: {note}")
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
    """Return the text that is printed after a prediction: numbers of images and detections by class, and of unreadable
    files.

    document: the content of predictions.json. out: the output folder.
    """
    counts = Counter(detection["category"] for image in document["images"] for detection in image["detections"])
    by_class = ", ".join(f"{count} {shown(name, 40)}" for name, count in counts.most_common())
    written = [f"{path}/" if path.is_dir() else str(path) for path in outputs_in(out)]
    lines = [
        f"{document['model']}: {len(document['images'])} images, {counts.total()} detections of score above "
        f"{document['score_threshold']}" + (f" ({by_class})" if by_class else ""),
        f"written: {', '.join(written)}",
    ]
    if document["errors"]:
        lines.append(f'{len(document["errors"])} files could not be read; they are listed there under "errors"')
    return "\n".join(lines)
