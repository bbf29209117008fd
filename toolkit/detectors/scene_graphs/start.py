"""The start of a scene graph run: building the model, with its weights and the statistics of the training split."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.base.distributed import run_on_main, world
from toolkit.base.errors import BadInput
from toolkit.data.table import DetectionTable
from toolkit.detectors.scene_graphs.frequency import count_predicates, table_graphs
from toolkit.detectors.scene_graphs.graph_detector import GraphDetector, check_joined
from toolkit.detectors.scene_graphs.options import GraphOptions, SceneGraphOptions
from toolkit.models import options_class
from toolkit.models.start import start_detector
from toolkit.models.weights.pretrained import Pretrained, open_pretrained
from toolkit.run.checkpoint import Checkpoint

GRAPH_ARCHITECTURES = ("scene_graph", "egtr")
COUNT_BUFFERS = ("relation_counts", "candidate_counts", "seen_triplets")


def start_scene_graph(
    options: GraphOptions,
    table: DetectionTable,
    folder: Path,
    *,
    checkpoint: Checkpoint | None,
    say: Callable,
) -> GraphDetector:
    """Build the model that the settings describe, load the weights of `options.detector`, and give it the counts of the
    training data.

    The settings that follow from the data and the detector's run are written to `<folder>/pretrained_config.json`, so
    that the model can be built again from only the run folder. A table of which parameter was loaded from which tensor
    is written to `<folder>/detector_weights.txt`.

    Args:
        options: settings; `detector` is a run, checkpoint or final/ folder of a detector, or a file of published
            weights, such as those of maskrcnn-benchmark.
        table: training data.
        folder: the run folder.
        checkpoint: the checkpoint that a resumed run will load. Weights and counts are in it and are not read from
            elsewhere.
        say: prints a text on the main process.

    Raises:
        BadInput: the training data have no relations; the detector cannot be loaded, is a scene graph itself, or has
            other classes; the scene graph of `pretrained` has other classes, predicates or attributes; the training
            data have other attributes than the checkpoint; or `start_detector` raises it.
    """
    source = None
    known = None
    check_joined(table, "data.path, data.train")
    if checkpoint is None:
        source, known = _facts_of_fresh_run(options, table)
    resumed_from = None if checkpoint is None else checkpoint.path
    model = start_detector(
        options,
        table.class_names,
        folder,
        resumed_from=resumed_from,
        say=say,
        known=known,
    )
    if model.attributes and model.attributes != table.attributes:
        table_names = list(table.attributes)
        run_names = list(model.attributes)
        differ = f"{table.name} has the attributes {table_names}, the run so far {run_names}"
        raise BadInput(f"{differ}: resume it on its own data")
    if checkpoint is not None:
        saved = checkpoint.tensors["model"]
        model.learn_counts(*(saved[name].numpy() for name in COUNT_BUFFERS))
    else:
        _start_counts(model, options, table, say)
    if source is not None:
        loaded = model.load_detector_weights(source.tensors)
        say(f"weights of the detector {source.name}:\n{loaded.summary()}")
        if world()[0] == 0:
            (folder / "detector_weights.txt").write_text(loaded.table() + "\n", encoding="utf-8")
    return model


def _start_counts(model: GraphDetector, options: GraphOptions, table: DetectionTable, say: Callable) -> None:
    """Give a fresh model the counts of the training data, and the word vectors of the settings."""
    if not options.pretrained:
        model.learn_counts(*run_on_main(lambda: count_table(table, model.counts_pairs_apart)))
        if getattr(options, "word_vectors", None):  # EGTR has no class vectors
            _start_from_words(model, options, table, say)
    elif not model.seen_triplets.any():  # published weights come without counts, but with the frequencies they learnt
        counts = run_on_main(lambda: count_table(table, model.counts_pairs_apart))
        GraphDetector.learn_counts(model, *counts)


def _facts_of_fresh_run(options: GraphOptions, table: DetectionTable) -> tuple[Pretrained | None, dict]:
    """Return the weights of `options.detector`, if any, and the settings that they and the data determine.

    Raises BadInput as `start_scene_graph`.
    """
    if not len(table.relations()):
        remedy = "give data with relations, whose formats docs/scene_graph_data.md lists, or train a detector on these"
        what = f"there is not a single relation between the boxes of its {len(table)} images"
        raise BadInput(f"{table.name}: {what}; {remedy}")
    if (options.detector_options or {}).get("pretrained_backbone"):
        remedy = "give them as model.pretrained_backbone"
        raise BadInput(f"model.detector_options: the weights of the backbone are not among them; {remedy}")
    if options.pretrained:
        _check_same_names(open_pretrained(options.pretrained), table)
    known = {"predicates": list(table.predicates), "attributes": list(table.attributes)}
    if not options.detector:
        return None, known
    source = _open_detector(options, table)
    given = _given_settings(options, source)
    known["detector_options"] = {
        "architecture": source.architecture,
        **source.options,
        **{name: value for name, value in given.items() if _is_free(name, source)},
    }
    known["pretrained_backbone"] = False  # its weights are among the detector's
    return source, known


def _start_from_words(model: GraphDetector, options: SceneGraphOptions, table: DetectionTable, say: Callable) -> None:
    vectors = load_word_vectors(options.word_vectors, table.class_names, model.embed_dim)
    names = start_from_words(model.head, vectors)
    if not names:
        raise BadInput(f"model.word_vectors: the head {options.head} has no class vectors; leave them out")
    say(f"class vectors of {options.word_vectors}: {', '.join(names)}")


def load_word_vectors(file: str | Path, class_names: Sequence[str], dim: int) -> Tensor:
    """Load vectors (2 + C, dim) float32 for "nothing before", background, and each of C classes, from a text file with
    one word and its vector per line, such as those of GloVe (Pennington et al., 2014).

    A class gets the vector of its name; if the file does not have it, that of the longest word in the name that the
    file has; otherwise one drawn from N(0, 1), as in Scene-Graph-Benchmark. Raises BadInput if the file cannot be read,
    or its vectors do not have `dim` numbers.
    """
    names = ["start", "__background__", *(name.lower() for name in class_names)]
    wanted = {word for name in names for word in (name, *name.split())}
    of_word = {}
    try:
        with open(Path(file).expanduser(), encoding="utf-8") as lines:
            for line in lines:
                word, _, numbers = line.partition(" ")
                if word in wanted:
                    of_word[word] = torch.tensor([float(number) for number in numbers.split()])
    except (OSError, ValueError) as error:
        raise BadInput(f"model.word_vectors: {file} cannot be read as word vectors: {error}") from error
    widths = {len(vector) for vector in of_word.values()}
    if widths != {dim}:
        raise BadInput(
            f"model.word_vectors: {file} has vectors of {sorted(widths) or 'none of the classes'}; expected {dim} "
            "numbers a word (model.embed_dim)"
        )
    vectors = torch.randn(len(names), dim)
    for row, name in enumerate(names):
        longest_first = sorted(name.split(), key=len, reverse=True)
        for word in (name, *longest_first):
            if word in of_word:
                vectors[row] = of_word[word]
                break
    return vectors


@torch.no_grad()
def start_from_words(head: nn.Module, vectors: Tensor) -> list[str]:
    """Set the class embeddings of a head, in place, and return the names of these modules; [] if the head has none.

    vectors: see `load_word_vectors`. The embeddings of label decoders get the row "nothing before" too, others do not.
    """
    rows = {
        "embed_in": vectors[1:],
        "embed_out": vectors[1:],
        "embed": vectors,
    }
    changed = []
    for name, module in head.named_modules():
        own_name = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and own_name in rows:
            module.weight.copy_(rows[own_name])
            changed.append(name)
    return changed


def count_table(table: DetectionTable, pairs_apart: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the relations and the candidate pairs of a training split, see `count_predicates`, and (C, C, P) bool for
    C classes and P predicates without background: which triplets of subject class, object class and predicate occur in
    it.

    pairs_apart: also count relations between boxes that share no area.
    """
    classes = len(table.categories)
    predicates = len(table.predicates)
    graphs = table_graphs(table, pairs_apart)
    relations, candidates = count_predicates(graphs, classes + 1, predicates + 1)
    seen = np.zeros((classes, classes, predicates), bool)
    for row in map(table.row, range(len(table))):
        ends = row["relations"]
        labels = row["objects"]["category"]
        seen[labels[ends["subject"]], labels[ends["object"]], ends["predicate"]] = True
    return relations, candidates, seen


def lacking_relations(table: DetectionTable, val_table: DetectionTable) -> list[str]:
    """Return warnings, as texts: the validation data have no relations, or they have predicates that the training data
    never have. Both tables must have the same predicates. [] if nothing is missing."""
    trained = np.bincount(table.relations().predicate, minlength=len(table.predicates))
    validated = np.bincount(val_table.relations().predicate, minlength=len(val_table.predicates))
    if not validated.any():
        what = f"there is not a single relation between the boxes of its {len(val_table)} images: R@K is not measured"
        return [f"warning: {val_table.name}: {what}"]
    is_unseen = (trained == 0) & (validated > 0)
    unseen = [f"{table.predicates[i]} ({validated[i]})" for i in np.flatnonzero(is_unseen)]
    if not unseen:
        return []
    listed = ", ".join(unseen[:10]) + f" and {len(unseen) - 10} more" * (len(unseen) > 10)
    return [f"warning: predicates of the validation data that training never has, and that are not learnt: {listed}"]


def _check_same_names(source: Pretrained, table: DetectionTable) -> None:
    """Check that source and table have the same names: a head's tensors combine classes and predicates, so its rows fit
    no other names."""
    trained = {"classes": source.class_names, "predicates": source.options.get("predicates", [])}
    if "attributes" in source.options:  # published weights have no such classifier: a new one is trained
        trained["attributes"] = source.options["attributes"]
    given = {
        "classes": table.class_names,
        "predicates": list(table.predicates),
        "attributes": list(table.attributes),
    }
    faults = [
        f"model.pretrained {source.name} knows the {kind} {trained[kind]}, the data {given[kind]}: give data of the "
        "same ones in the same order, or start from only a detector with model.detector"
        for kind in trained
        if list(trained[kind]) != given[kind]
    ]
    if source.architecture in GRAPH_ARCHITECTURES and faults:  # start_detector refuses other architectures
        raise BadInput(faults)


def _given_settings(options: GraphOptions, source: Pretrained) -> dict:
    given = {key: value for key, value in (options.detector_options or {}).items() if value is not None}
    return given if options.backbone is None else given | {"backbone": options.backbone}


def _is_free(name: str, source: Pretrained) -> bool:
    """Return whether a setting of the detector can be given in addition to its weights: it changes nothing that was
    learned, or the weights are a published file, which does not hold the setting."""
    of_file = Path(source.name).expanduser().is_file() and name not in source.options
    return of_file or name in options_class(source.architecture).inference_only


def _other_settings(options: GraphOptions, source: Pretrained) -> list[str]:
    """Return the given settings of the detector that differ from the source's, as in the config.yaml of a run on that
    source."""
    source_settings = asdict(options_class(source.architecture)()) | source.options
    given = {name: value for name, value in _given_settings(options, source).items() if not _is_free(name, source)}
    return [name for name, value in given.items() if source_settings.get(name, value) not in (None, value)]


def _detector_of(source: Pretrained) -> Pretrained:
    """Return the detector below a published scene graph."""
    prefix = "detector."
    tensors = {name[len(prefix) :]: value for name, value in source.tensors.items() if name.startswith(prefix)}
    options = dict(source.options["detector_options"])
    return replace(
        source,
        architecture=options.pop("architecture"),
        options=options,
        tensors=tensors,
    )


def _open_detector(options: GraphOptions, table: DetectionTable) -> Pretrained:
    name = options.detector
    source = open_pretrained(name)
    if source.architecture == "scene_graph" and Path(name).expanduser().is_file():
        source = _detector_of(source)
    source.options.pop("masks", None)  # which a scene graph does not use
    problems = []
    if source.architecture in GRAPH_ARCHITECTURES:
        problems.append(f"model.detector {name} is a scene graph; expected a detector, or give it as model.pretrained")
    if source.class_names != table.class_names:
        mismatch = f"knows the classes {source.class_names}, the data {table.class_names}"
        problems.append(f"model.detector {name} {mismatch}; train the detector on the same classes in the same order")
    other = ", ".join(_other_settings(options, source))
    if other:
        given = "model.detector_options and model.backbone are those of"
        problems.append(f"{given} model.detector {name}, which has another {other}: leave them out")
    if problems:
        raise BadInput(problems)
    return source
