"""PE-Net and REACT against numbers of their own code, and what weighs rare predicates.

    python -m pytest tests/test_prototype_heads.py

`data/relation_heads/prototypes.npz`: outputs of VL-Group/PENET (9c9f507) and Maelic/SGG-Benchmark (a664201), both MIT,
on small random weights and inputs that it holds too.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.scene_graphs.batch import RelationBatch, mean
from toolkit.scene_graphs.frequency import class_balanced_weights, log_prior
from toolkit.scene_graphs.heads import HeadSizes, build_relation_head

FILE = Path(__file__).parent / "data" / "relation_heads" / "prototypes.npz"
NAMES = [  # of the originals -> ours, in order
    (r"post_emb", "split"), (r"obj_embed1", "embed_in"), (r"obj_embed", "embed_out"), (r"rel_embed", "predicate_embed"),
    (r"W_sub", "subject_word"), (r"W_obj", "object_word"), (r"W_pred", "predicate_word"), (r"gate_sub", "subject_gate"),
    (r"gate_obj", "object_gate"), (r"gate_pred", "predicate_gate"), (r"vis2sem", "seen"), (r"project_head", "project"),
    (r"(linear|norm)_sub", r"subject_mix.\1"), (r"(linear|norm)_obj", r"object_mix.\1"),
    (r"(linear|norm)_rel_rep", r"pair_mix.\1"), (r"down_samp", "union"), (r"pos_embed", "position"),
    (r"out_obj", "object_out"), (r"lin_obj_cyx", "object_in"), (r"so_linear_layer", "join"),
    (r"layers\.1", "2"), (r"layers\.0", "0"),
]  # fmt: skip


def our_name(name: str) -> str:
    for pattern, ours in NAMES:
        name = re.sub(pattern, ours, name)
    return name


@pytest.fixture(scope="module")
def data():
    with np.load(FILE) as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.mark.parametrize(("name", "mode"), [("penet", "predcls"), ("penet", "sgcls"), ("penet", "sgdet"),
                                            ("react", "predcls")])  # fmt: skip
def test_heads_give_the_numbers_of_their_originals(data, name, mode):
    """REACT takes the detector's labels in every mode: the same numbers."""
    state = {key.removeprefix(f"{name}/state/"): v for key, v in data.items() if key.startswith(f"{name}/state/")}
    union = data[f"union/{name}"]
    sizes = HeadSizes(5, 13, roi_dim=7, union_dim=union.shape[1], hidden_dim=4, pooling_dim=6, embed_dim=3)
    head = build_relation_head(name, mode, sizes, torch.zeros(5, 5, 13), dim=8, dropout=0.0)
    own = head.state_dict()
    ours = {our_name(key): value for key, value in state.items() if not key.startswith("linear_pred")}  # never used
    head.load_state_dict({key: ours[key] if "num_batches" not in key else own[key] for key in own})
    assert ours.keys() <= own.keys()
    fields = ("boxes", "sizes_hw", "num_objects", "pairs", "num_pairs", "roi_features", "labels", "logits",
              "boxes_per_class", "relation_labels")  # fmt: skip
    given = {key: data[key].tolist() if key.startswith("num") else data[key] for key in fields}
    batch = RelationBatch(boxes_xyxy=given.pop("boxes"), union_features=union, **given)
    for training in (False, True):
        with torch.no_grad():
            output = head.train(training)(batch)
        prefix = f"{name}/{mode}/{'train' if training else 'eval'}/"
        expected = {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}
        found = {"object_logits": output.object_logits, "relation_logits": output.relation_logits}
        found |= {key: mean(sums.sum(), counts.sum()) for key, (sums, counts) in output.extra_losses.items()}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4)


def test_effective_numbers_weigh_rare_predicates():
    counts = np.zeros((2, 2, 5), np.int64)
    counts[0, 1] = [900, 1000, 100, 1, 0]
    weights = class_balanced_weights(counts, 0.99).double()
    effective = torch.tensor([(1 - 0.99**n) / (1 - 0.99) for n in (1000, 100, 1)])
    torch.testing.assert_close(weights[1:4] * effective, (weights[1] * effective[0]).expand(3), rtol=1e-4, atol=0)
    assert weights[0] == weights[4] == 1
    assert float((weights[1:4] * torch.tensor([1000, 100, 1])).sum()) == pytest.approx(1101, rel=1e-5)
    prior = log_prior(torch.from_numpy(counts))
    assert prior[0] == 0 and prior[1] > prior[2] > prior[3] == prior[4] and prior.isfinite().all()
    torch.testing.assert_close(prior[1:].exp().sum(), torch.tensor(1.0))
