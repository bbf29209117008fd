"""The tracker for W&B: sends rows, pictures with switchable boxes and masks, plots, a reference to the data, and the
finished detector.

Without an account or a network, everything is written to files in the run folder, which `wandb sync` sends later.
"""

import os
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from toolkit.run.writer import DataFacts, RunDescription, Tracker, agent_run_id, flat

INIT_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 300  # so that a lost network does not delay a finished run; older releases lack this
CURVE_POINTS = 100
MAX_MASK_ID = 127  # W&B keeps the classes of a mask's pixels as int8
LOGGED_FILES = ("config.yaml", "environment.json", "code.diff")  # of the run folder, kept with the run


class WandbTracker(Tracker):
    """A tracker that sends a run to Weights & Biases."""

    def start(self, folder: Path, about: RunDescription, is_new: bool, was_closed: bool) -> None:
        import wandb  # imported here, since it takes half a second

        # Copies of the pictures in tables wait there to be sent; without a network they stay with the run.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))
        resumed = self.run_id is not None
        self.run_id = self.run_id or agent_run_id() or uuid.uuid4().hex[:8]
        self._run = _init(wandb, folder, about, self.run_id)
        if resumed and not was_closed:  # killed: the last rows may not have reached the server or a file
            self.floor = self._run.step - 1  # of the server; -1 without a network: a row sent twice has the same step
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for name in LOGGED_FILES:
            if (folder / name).exists():
                self._run.save(str(folder / name), base_path=str(folder), policy="now")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **values}, step=step)

    def show(self, shown, step: int) -> None:
        import wandb

        values = _plots(wandb, shown)
        if shown.images:
            images = [_image(wandb, image, shown.class_names) for image in shown.images]
            counts = [(len(i.truth_labels), int((i.found_scores > shown.threshold).sum())) for i in shown.images]
            rows = [[str(i.image_id), image, *n] for i, image, n in zip(shown.images, images, counts, strict=True)]
            columns = ["image", "boxes", "annotated", f"found above {shown.threshold:g}"]
            values |= {
                "val/predictions": images,
                "val/images": wandb.Table(columns=columns, data=rows),
            }
        self._run.log({"step": step, **values}, step=step)

    def note_data(self, data: Mapping[str, DataFacts]) -> None:
        """Log one artifact that refers to the data by their fingerprints; the data are not copied or sent."""
        import wandb

        marks = {split: facts.fingerprint for split, facts in data.items()}
        if self.notes.get("data") == marks:
            return
        metadata = {split: vars(facts) for split, facts in data.items()}
        artifact = wandb.Artifact(
            f"data-{data['train'].fingerprint[:16]}",
            "dataset",
            metadata=metadata,
        )
        for split, facts in data.items():
            artifact.add_reference(f"data://{facts.fingerprint}/{facts.uri}", name=split)
        if self._run.offline:  # an offline run cannot look up artifacts, and refuses `use_artifact`
            self._run.log_artifact(artifact)
        else:
            self._run.use_artifact(artifact)
        self.notes["data"] = marks

    def keep_final(self, final: Path, facts: Mapping) -> None:
        """Log the files in `final` as the artifact `best-<run id>`, unless its newest version has the same files."""
        import wandb

        artifact = wandb.Artifact(f"best-{self.run_id}", "model", metadata=dict(facts))
        artifact.add_dir(str(final), policy="immutable", skip_cache=True)
        if self.notes.get("final") == artifact.digest:
            return
        self._run.log_artifact(artifact, aliases=["best", "latest", f"step-{facts['step']}"])
        self._run.summary["best/artifact_digest"] = self.notes["final"] = artifact.digest

    def close(self, state: str) -> None:
        if state == "preempted":
            self._run.mark_preempting()  # a sweep then gives the trial to an agent again
        self._run.finish(exit_code=0 if state == "done" else 1)


def _init(wandb, folder: Path, about: RunDescription, run_id: str):
    """Start the run, online if possible, otherwise offline with one warning."""
    limits = {"init_timeout": INIT_TIMEOUT_S, "finish_timeout": FINISH_TIMEOUT_S}
    settings = wandb.Settings(**{k: v for k, v in limits.items() if k in wandb.Settings.model_fields})
    options = {key: getattr(about, key) for key in ("project", "name", "group", "job_type")}
    options["dir"] = str(folder)
    options["settings"] = settings
    options["config"] = flat(about.config)
    options["tags"] = list(about.tags) or None
    options["notes"] = about.notes or None
    if agent_run_id() is None:  # else W&B takes the agent's id and group, and warns of any other
        options["id"] = run_id
    online = {} if os.environ.get("WANDB_MODE") == "offline" else {"resume": "allow"}
    try:
        with _no_prompts():
            return wandb.init(**options, **online)
    except (wandb.errors.UsageError, wandb.errors.CommError) as error:  # no key; no network
        warnings.warn(
            f"W&B cannot be reached ({str(error).partition(chr(10))[0]}); logging offline. Send it later with "
            f"`wandb sync {folder}/wandb/offline-run-*`.",
            stacklevel=2,
        )
        wandb.teardown()  # or W&B treats the failed attempt's id as in use
        return wandb.init(**options, mode="offline")


def _image(wandb, shown, class_names: list[str]):
    """Return a picture as JPEG, with annotated and found boxes and masks as layers; scores can be filtered there.

    With masks, the class ids of boxes too begin at 1: 0 is the background of a mask.
    """
    has_masks = shown.truth_map is not None
    first_id = 1 if has_masks else 0
    names = dict(enumerate(class_names, start=first_id))

    def layer(boxes, labels, scores=None) -> dict:
        found = []
        for i, (box, label) in enumerate(zip(boxes.tolist(), labels.tolist(), strict=True)):
            place = dict(zip(("minX", "minY", "maxX", "maxY"), box, strict=True))
            class_id = first_id + label
            name = names.setdefault(class_id, f"label {label}?")
            entry = {"position": place, "domain": "pixel", "class_id": class_id, "box_caption": name}
            if scores is not None:
                score = float(scores[i])
                entry |= {"scores": {"score": score}, "box_caption": f"{name} {score:.2f}"}
            found.append(entry)
        return {"box_data": found, "class_labels": names}

    layers = {
        "ground_truth": layer(shown.truth_boxes, shown.truth_labels),
        "predictions": layer(shown.found_boxes, shown.found_labels, shown.found_scores),
    }
    if has_masks:
        names[0] = "background"
    classes = wandb.Classes([{"id": class_id, "name": name} for class_id, name in sorted(names.items())])
    return wandb.Image(
        shown.picture,
        caption=str(shown.image_id),
        file_type="jpg",
        boxes=layers,
        masks=_mask_layers(shown, names) if has_masks else None,
        classes=classes,
    )


def _mask_layers(shown, names: Mapping[int, str]) -> dict:
    """Return annotated and found masks as layers; of classes with an id that W&B cannot keep there are none."""
    layers = {}
    for name, ids in (("ground_truth", shown.truth_map), ("predictions", shown.found_map)):
        kept = np.where(ids > MAX_MASK_ID, 0, ids).astype(np.uint8)
        layers[name] = {"mask_data": kept, "class_labels": dict(names)}
    return layers


def _plots(wandb, shown) -> dict:
    """Return precision against recall, F1 against score, confusions and AP of each class, as W&B's own kinds of
    plot."""
    curve = []
    f1 = []
    for name, sweep in shown.curves.items():
        rows = np.unique(np.linspace(0, len(sweep.score) - 1, CURVE_POINTS).astype(int)) if len(sweep.score) else []
        curve += [[name, float(sweep.recall[i]), float(sweep.precision[i])] for i in rows]
        f1 += [[float(sweep.score[i]), float(sweep.f1[i]), name] for i in rows]
    rows = [*shown.matrix_names, "background"]
    columns = [*shown.matrix_names, "missed"]
    confusions = [[a, p, int(shown.matrix[i, j])] for i, a in enumerate(rows) for j, p in enumerate(columns)]

    def plot(kind: str, title: str, columns: dict[str, str], data: list):
        """Return one plot. columns: names of the data's columns by the names that this kind of plot uses."""
        table = wandb.Table(columns=list(columns.values()), data=data)
        return wandb.plot_table(f"wandb/{kind}", table, columns, {"title": title})

    of_curve = {"class": "class", "x": "recall", "y": "precision"}
    of_f1 = {"step": "score", "lineVal": "f1", "lineKey": "class"}
    of_matrix = {name: name for name in ("Actual", "Predicted", "nPredictions")}
    above = f"Confusions above {shown.threshold:g}, IoU 0.5"
    ap = [[name, value] for name, value in shown.ap.items()]
    return {
        "val/precision_recall": plot(
            "area-under-curve/v0",
            "Precision against recall, IoU 0.5",
            of_curve,
            curve,
        ),
        "val/f1": plot("lineseries/v0", "F1 against score, IoU 0.5", of_f1, f1),
        "val/confusion_matrix": plot("confusion_matrix/v1", above, of_matrix, confusions),
        "val/class_AP": plot("bar/v0", "AP of each class", {"label": "class", "value": "AP"}, ap),
    }


@contextmanager
def _no_prompts() -> Iterator[None]:
    """Keep W&B from asking for an account on a terminal without a key, since no user may be present to answer."""
    stdin = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin
