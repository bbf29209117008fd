"""Measure this toolkit against plain programs that do the same, and print one Markdown table.

    python scripts/benchmark.py                       # everything: about 12 minutes on two CPU cores; `make bench`
    python scripts/benchmark.py --only loop startup   # some
    python scripts/benchmark.py --quick               # small sizes: shows that it runs, the figures mean nothing
    python scripts/benchmark.py --only gpu --out runs/gpu   # on a GPU, 7 minutes at most; `make gpu`
    python scripts/benchmark.py --only peers --out runs/peers/shapes   # beside other toolkits, 45 minutes; an extra

Ratios are medians of interleaved rounds in one process; each has a line of ours (or of the plain program) against
itself, which is the noise: a ratio as close to its requirement as that line is to 1 shows nothing.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benches.augmentation import bench_augmentation
from benches.criterion import bench_criterion
from benches.evaluation import bench_evaluation
from benches.gpu import bench_gpu
from benches.launches import bench_launches
from benches.loading import bench_loading
from benches.loop import bench_loop
from benches.memory import bench_memory
from benches.peers import bench_peers, bench_peers_masks, bench_peers_sets, bench_peers_trained
from benches.peers_predict import bench_peers_predict
from benches.predict import bench_predict
from benches.reading import bench_reading
from benches.roi_align import bench_roi_align
from benches.scene_graph import bench_graph_evaluation, bench_relation_heads
from benches.ssd import bench_ssd
from benches.startup import bench_startup
from benches.table import bench_table
from benches.yolov3 import bench_yolov3_export, bench_yolov3_losses

from toolkit.base.errors import exit_on_bad_input
from toolkit.base.files import replace_nonfinite, write_json_atomic
from toolkit.run.folder import PACKAGES, hardware
from toolkit.tools.arguments import Program

# name, function, arguments of --quick
BENCHES: tuple[tuple[str, Callable[..., Iterable[dict]], dict], ...] = (
    ("loop", bench_loop, {"blocks": 1, "steps": 1, "narrow_blocks": 1, "narrow_steps": 2}),
    ("launches", bench_launches, {"scripts": ["train_ssd"], "processes": [1]}),
    ("criterion", bench_criterion, {"batch_size": 2, "num_queries": 10, "boxes_per_image": 3, "repeats": 1}),
    ("loading", bench_loading, {"num_images": 4, "batch_size": 2, "repeats": 1}),
    ("augmentation", bench_augmentation, {"num_images": 2, "recipes": ("detr/deimv2_s_coco", "yolov3/own_data")}),
    ("evaluation", bench_evaluation, {"num_images": 20, "num_detections": 20, "num_classes": 5, "repeats": 1}),
    ("table", bench_table, {"num_images": 500, "num_boxes": 3000, "repeats": 1}),
    ("reading", bench_reading, {"sizes": {300: 2000}}),
    ("startup", bench_startup, {"repeats": 1}),
    ("memory", bench_memory, {"steps": 2, "images": 16}),
    ("yolov3_losses", bench_yolov3_losses, {"batch": 1, "side": 64, "boxes": 3, "num_classes": 4, "repeats": 1}),
    ("yolov3_export", bench_yolov3_export, {"batch": 1, "side": 64, "repeats": 1}),
    ("graph_evaluation", bench_graph_evaluation, {"num_images": 6, "num_objects": 9, "num_pairs": 60, "repeats": 1}),
    ("relation_heads", bench_relation_heads, {"num_images": 2, "num_objects": 4, "repeats": 1}),
    ("predict", bench_predict, {"images": 3, "side": 64, "size": 64, "rounds": 1}),
    ("roi_align", bench_roi_align, {"channels": 2, "repeats": 1, "fewer": 16}),
    ("ssd", bench_ssd, {"batch": 2, "side": 64, "boxes": 3, "num_classes": 4, "repeats": 1}),
    ("gpu", bench_gpu, {"quick": True}),
    ("peers", bench_peers, {"minutes": 0.05}),
    ("peers_bccd", partial(bench_peers, "bccd"), {"minutes": 0.05}),
    ("peers_masks", bench_peers_masks, {"minutes": 0.05}),
    ("peers_sets", bench_peers_sets, {"minutes": 0.05}),
    ("peers_trained", bench_peers_trained, {"minutes": 0.05}),
    ("peers_predict", bench_peers_predict, {}),
)
# Run only if named.
ASKED_FOR = {"gpu", "peers", "peers_bccd", "peers_masks", "peers_predict", "peers_sets", "peers_trained"}
# Requirements of rows; the other rows explain them.
REQUIREMENTS = {
    "loop, DETR-R50, ours / bare": "≤ 1.03",
    "loop, Faster R-CNN-R50, ours / bare": "≤ 1.03",
    "loop, SSD-MobileViT-S, ours / bare": "≤ 1.03",
    "loop, YOLOv3-Darknet53, ours / bare": "≤ 1.03",
    "criterion: transformers / ours": "≥ 4",
    "loading: ours / Pillow": "≥ 3",
    "evaluation, pycocotools / ours": "≥ 5",
    "evaluation, largest difference": "≤ 1e-12",
    "table, opened from cache": "≤ 2",
    "table, memory per worker, epoch 1": "≤ 100",
    "table, memory per worker, epoch 3": "≤ 100",
    "COCO file of 118,000 images, read": "≤ 8",
    "COCO file of 118,000 images, read, memory": "≤ 250",
    "yolov3 losses, loop / ours": "≥ 10",
    "yolov3, largest difference of a box": "≤ 0.01",
    "yolov3, largest difference of a score": "≤ 0.0001",
    "RoIAlign's gradient, boxes, map of 32 x 32, torchvision / ours": "≥ 4",
    "RoIAlign's gradient, largest difference": "≤ 1e-9",  # of sums of hundreds
    "prediction, ours / plain": "≥ 1",
    "prediction, largest difference of a score": "≤ 0.0001",
    "scene graph evaluation, plain / ours": "≥ 20",
    "scene graph evaluation, largest difference": "≤ 1e-12",  # sums in another order
    "relation head motifs, alone / together": "≥ 3",
    "relation head vctree, alone / together": "≥ 3",
}


def main(argv: Sequence[str] | None = None) -> list[dict]:
    """Run the benches that `argv` names (default: the process's arguments), print their rows and return them."""
    parser = Program(__doc__)
    names = [name for name, _, _ in BENCHES]
    usual = [name for name in names if name not in ASKED_FOR]
    parser.add_argument("--only", nargs="+", choices=names, default=usual, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the table there too: table.md and rows.json")
    parser.add_argument("--long", action="store_true", help="of gpu: every mode, an hour or so instead of 7 minutes")
    parser.add_argument("--items", nargs="+", default=[], metavar="WORD",
                        help="of gpu: only what has one of these words in its title, such as resumed")  # fmt: skip
    arguments = parser.parse_args(argv)
    system = hardware_seen_elsewhere() if "gpu" in arguments.only else hardware()
    rows = []
    for name, bench, quick in BENCHES:
        if name in arguments.only:
            began = time.perf_counter()
            options = quick if arguments.quick else {}
            if name == "gpu":
                options = {**options, "long": arguments.long, "words": arguments.items, "folder": arguments.out}
            for row in bench(**options):
                rows.append(row)
                if arguments.out is not None:
                    keep(rows, arguments.out, arguments.quick, system)
                    print(f"{row['name']}: {row['value']:.4g} {row['unit']}", file=sys.stderr, flush=True)
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(markdown(rows, arguments.quick, system))
    return rows


def hardware_seen_elsewhere() -> dict:
    """Return `hardware()` as a fork of this process sees it: to name a GPU starts CUDA, and a process that has started
    CUDA cannot fork others that use it."""
    if not hasattr(os, "fork"):
        return hardware()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(hardware)


def keep(rows: Sequence[dict], folder: Path, quick: bool, system: Mapping) -> None:
    """Write the rows measured so far, so that they are kept however the program ends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown(rows, quick, system) + "\n", encoding="utf-8")
    document = {"machine": machine(system), "hardware": system, "quick": quick, "rows": rows}
    write_json_atomic(folder / "rows.json", replace_nonfinite(document))


def markdown(rows: Sequence[dict], quick: bool, system: Mapping) -> str:
    """Return the rows as a table below a paragraph on the machine and the versions."""
    lines = [machine(system) + (" Quick run: sizes too small for the figures to mean anything." if quick else ""), ""]
    lines += ["| measured | value | unit | required |", "|---|---:|---|---|"]
    for row in rows:
        required = row.get("required", REQUIREMENTS.get(row["name"], ""))
        lines.append(f"| {row['name']} | {row['value']:.4g} | {row['unit']} | {required} |")
    return "\n".join(lines)


def machine(system: Mapping) -> str:
    """Return the date, processor, accelerators, threads and versions in one paragraph.

    system: what `toolkit.run.folder.hardware` has returned.
    """
    gpus = ", ".join(system["gpus"]) or "no GPU"
    installed = []
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed.append(f"{name} {version(name)}")
    return (
        f"{date.today()}, {system['cpu']}, {system['cpu_cores_usable']} of {system['cpu_cores']} cores, "
        f"{system['memory_bytes'] / 2**30:.0f} GiB, {gpus}; torch uses {system['torch_threads']} threads; "
        f"Python {sys.version.split()[0]}, {', '.join(installed)}."
    )


@exit_on_bad_input
def command() -> None:
    main()


if __name__ == "__main__":
    sys.exit(command())
