"""Find objects in image files with a trained detector: a JSON file and a picture for each image.

    python scripts/predict.py runs/detr photo.jpg holiday/ --out found                    # a run: its best weights
    python scripts/predict.py runs/detr/checkpoints/latest 'holiday/**/*.jpg' --out found --weights model
    python scripts/predict.py runs/detr/final holiday/ --out found --score-threshold 0.5  # what a run leaves for use
    python scripts/predict.py facebook/detr-resnet-50 holiday/ --out found                # a model of the hub

IMAGES are files, folders (searched below too) and quoted patterns. `found/predictions.json` holds

    {"model": ..., "score_threshold": 0.3, "categories": [{"id": 7, "name": "platelet"}, ...],
     "images": [{"file_name": "holiday/a.jpg", "width": 640, "height": 480, "picture": "pictures/a.jpg",
                 "detections": [{"category_id": 7, "category": "platelet", "bbox": [x, y, width, height],
                                 "score": 0.93}, ...]}, ...],
     "errors": [{"file_name": "holiday/b.jpg", "error": "image data truncated"}, ...]}

with ids and names of the training data, boxes in pixels of the (upright) image as in COCO results, best first. Of a
scene-graph detector (sgdet) an image also has its best "relations": [{"subject": i, "object": j, "predicate": "on",
"score": 0.61}, ...], where i and j are positions in its detections. Files of an earlier prediction are overwritten.

Exit code 0: all done; 1: some files could not be read, they are listed and the others are done; 2: bad input.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from toolkit.errors import BadInput
from toolkit.evaluation.detections import detections_as_json, relations_as_json
from toolkit.evaluation.draw import draw_detections
from toolkit.files import write_text_atomic
from toolkit.use.prediction import FilePrediction, Predictor, find_images, open_predictor, predict_files


def predict(arguments: argparse.Namespace) -> int:
    """Writes everything and returns the exit code."""
    names = find_images(arguments.images, leave_out=arguments.out / "pictures")
    pictures = {} if arguments.no_pictures else picture_names(names)
    if lost := [path for path, picture in pictures.items() if (arguments.out / picture).resolve() == path.resolve()]:
        raise BadInput([f"{path}: its picture would overwrite it; choose another --out" for path in lost])
    predictor = open_predictor(arguments.model, arguments.weights, arguments.device)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {arguments.out}: cannot be written: {error.strerror}") from error
    predictions = predict_files(
        predictor, list(names), batch_size=arguments.batch_size, score_threshold=arguments.score_threshold
    )
    entries, errors = {}, {}
    for prediction in tqdm(predictions, "prediction", len(names), unit="image", disable=None):
        if prediction.error is not None:
            tqdm.write(f"{prediction.path}: {prediction.error}", file=sys.stderr)
            errors[prediction.path] = {"file_name": str(prediction.path), "error": prediction.error}
            continue
        entries[prediction.path] = entry(prediction, predictor)
        if pictures:
            picture = pictures[prediction.path]
            entries[prediction.path]["picture"] = str(picture)
            draw_detections(prediction.image, prediction.found, predictor.class_names, arguments.out / picture)
    document = {
        "model": predictor.source,
        "score_threshold": arguments.score_threshold,
        "categories": [{"id": category.id, "name": category.name} for category in predictor.categories],
        "images": [entries[path] for path in names if path in entries],
        "errors": [errors[path] for path in names if path in errors],
    }
    write_text_atomic(arguments.out / "predictions.json", as_text(document))
    print(summary(document, arguments.out))
    return 1 if errors else 0


def picture_names(names: dict[Path, Path]) -> dict[Path, Path]:
    """Where the picture of each file goes, below the output folder; files of one name get a number."""
    chosen: dict[Path, Path] = {}
    taken = set()
    for path, name in names.items():
        suffix = name.suffix if name.suffix.lower() in (".jpg", ".jpeg") else ".png"
        picture, number = Path("pictures") / name.with_suffix(suffix), 1
        while picture in taken:
            number += 1
            picture = picture.with_name(f"{name.stem}_{number}{suffix}")
        taken.add(picture)
        chosen[path] = picture
    return chosen


def entry(prediction: FilePrediction, predictor: Predictor) -> dict:
    height, width = prediction.image.shape[-2:]
    detections = detections_as_json(prediction.found, predictor.categories, predictor.attributes)
    result = {"file_name": str(prediction.path), "width": width, "height": height, "detections": detections}
    if "pairs" in prediction.found:
        result["relations"] = relations_as_json(prediction.found, predictor.predicates)
    return result


def as_text(document: dict) -> str:
    """JSON with a line for each image."""
    lists = {key: ",\n  ".join(json.dumps(each) for each in document[key]) for key in ("images", "errors")}
    lines = [f"{json.dumps(key)}: " + (f"[\n  {lists[key]}]" if lists.get(key) else json.dumps(value))
             for key, value in document.items()]  # fmt: skip
    return "{" + ",\n".join(lines) + "}\n"


def summary(document: dict, out: Path) -> str:
    found = Counter(each["category"] for image in document["images"] for each in image["detections"])
    counts = ", ".join(f"{count} {name}" for name, count in found.most_common())
    lines = [
        f"{document['model']}: {len(document['images'])} images, {found.total()} detections of score above "
        f"{document['score_threshold']:g}" + (f" ({counts})" if counts else ""),
        f"written: {out / 'predictions.json'}",
    ]
    if document["errors"]:
        lines.append(f"{len(document['errors'])} files could not be read; they are listed there under \"errors\"")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="run folder, checkpoint, final/ folder, or transformers model (folder, hub name)")
    parser.add_argument("images", nargs="+", help="image files, folders, quoted patterns")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--weights", choices=("model", "ema"), help="raw or averaged weights of a run")
    parser.add_argument("--score-threshold", type=float, default=0.3, help="smallest score (default 0.3)")
    parser.add_argument("--batch-size", type=int, default=8, help="images at a time (default 8)")
    parser.add_argument("--no-pictures", action="store_true", help="write the JSON only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, …")
    arguments = parser.parse_args(argv)
    try:
        if arguments.batch_size < 1:
            raise BadInput(f"--batch-size {arguments.batch_size}: expected 1 or more")
        return predict(arguments)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
