"""Relations of Open Images V6 in the layout that scene graph programs share (Zhang et al., CVPR 2019; Li et al., CVPR
2021): `vrd-{train,val,test}-anno.json`, a list with `img_fn`, `img_size` [width, height], `bbox` xyxy, `det_labels` and
`rel` rows of subject, object, predicate; `categories_dict.json` with the names `obj` and `rel`."""

from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.data.annotations import Annotations
from toolkit.data.image_sources import ImageSources
from toolkit.detectors.scene_graphs.readers.graphs import add_graph, empty_graphs, noting_faults

NUM_VAL_IMAGES = None


def files_of(folder: Path, split: str) -> list[Path]:
    """Return the files that the split train, val or test is read from, whether they exist or not."""
    return [folder / f"vrd-{split}-anno.json", folder / "categories_dict.json"]


def annotations_of(files: list[Path], images: Path | ImageSources, split: str, num_val: None) -> Annotations:
    """Return images, boxes and relations of a split. `images` and `num_val` are not used. Raises BadInput for a file or
    an entry that is not as expected."""
    entries = read_json(files[0], list)
    names = read_json(files[1])
    missing = [key for key in ("obj", "rel") if not isinstance(names.get(key), list)]
    if missing:
        raise BadInput([f"{files[1]}: list `{key}` missing" for key in missing])
    annotations = empty_graphs(names["obj"], names["rel"])
    problems = []
    for number, entry in enumerate(entries):
        with noting_faults(problems, f"{files[0]}, entry {number}", "img_fn, img_size, bbox, det_labels and rel"):
            width, height = entry["img_size"]
            boxes = []
            for label, (x1, y1, x2, y2) in zip(entry["det_labels"], entry["bbox"], strict=True):
                boxes.append((label, [x1, y1, x2 - x1, y2 - y1]))
            image = {
                "id": entry["img_fn"],
                "file_name": f"{entry['img_fn']}.jpg",
                "width": width,
                "height": height,
            }
            add_graph(annotations, image, boxes, entry["rel"])
    if problems:
        raise BadInput(problems)
    return annotations
