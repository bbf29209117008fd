"""Scene graphs of Scene-Graph-Benchmark and SGG-Benchmark (`upload_causal_motif_sgdet/model_0028000.pth`): a Faster
R-CNN of maskrcnn-benchmark with a relation head. They become a `scene_graph` with the settings read from the tensors.

The heads are those of `roi_relation_predictors.py`: Motifs, VCTree, IMP, Transformer, and the causal one with its three
contexts. `mode`, and the width of a transformer's attention heads, are in the settings of that program, not in the
file: here they are sgdet and 64, unless the user says otherwise.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.detectors.faster_rcnn.weights_maskrcnn_benchmark import CLASSIFIER, MASKRCNN_BENCHMARK, STEM
from toolkit.models.weights.names import (
    Description,
    IncompleteWeights,
    Publisher,
    class_names_for,
    pairs,
    renamed,
    required,
)

VG_50 = (  # the predicates of VG150, in the order of their rows
    "above, across, against, along, and, at, attached to, behind, belonging to, between, carrying, covered in, "
    "covering, eating, flying in, for, from, growing on, hanging from, has, holding, in, in front of, laying on, "
    "looking at, lying on, made of, mounted on, near, of, on, on back of, over, painted on, parked on, part of, "
    "playing, riding, says, sitting on, standing on, to, under, using, walking in, walking on, watching, wearing, "
    "wears, with"
).split(", ")
RELATION = "roi_heads.relation."
PREDICTOR = f"{RELATION}predictor."
SPATIAL = f"{RELATION}union_feature_extractor.spatial_fc.0.weight"
KEY_DIM = 64  # of a transformer's attention head, published
FEATURES = pairs(f"""
    {RELATION}box_feature_extractor box_features
    {RELATION}union_feature_extractor.feature_extractor.pooler.reduce_channel.0 union.pool.reduce
    {RELATION}union_feature_extractor.feature_extractor union.head
    {RELATION}union_feature_extractor.rect_conv union.rectangles.conv
    {RELATION}union_feature_extractor.spatial_fc union.spatial
""")
# Settings of the detector below a relation head, from the program's configuration.
DETECTOR_OPTIONS = {"rpn_pre_nms_top_n_train": 6000, "rpn_pre_nms_top_n_test": 6000, "rpn_post_nms_top_n_train": 1000}
DETECTOR_OPTIONS |= {"score_threshold": 0.01, "nms_threshold": 0.3, "rpn_min_size": 0.0, "box_bg_iou_thresh": 0.3}
IMAGE_SIZE = {"shortest_edge": 600, "longest_edge": 1000}
CONV_POSITIONS = "untreated_conv_spt"  # read with separate spatial features only
DEAD = [CONV_POSITIONS, "avg_post_ctx", "untreated_feat"]  # buffers that are not read
DEAD_UNLESS_VTRANSE = "context_layer.untreated_obj_feat"
DEAD_UNLESS_CAUSAL = ["context_layer.untreated_dcd_feat", "context_layer.untreated_edg_feat"]
NAME_PATTERNS = [  # of the original -> ours, applied in order to "<head>:<name>"
    (r"context_layer\.untreated_dcd_feat", "context.mean_decoder_input.value"),
    (r"context_layer\.untreated_obj_feat", "context.mean_object_input.value"),
    (r"context_layer\.untreated_edg_feat", "context.mean_edge_input.value"),
    (r"untreated_spt", "mean_positions.value"),
    (r"context_layer\.(obj_fc)", "object_out"),
    (r"context_layer\.(rel_fc)", "pair_out"),
    (r"context_layer\.obj_unary", "object_in"),
    (r"context_layer\.edge_unary", "pair_in"),
    (r"context_layer\.node_gru", "object_gru"),
    (r"context_layer\.edge_gru", "pair_gru"),
    (r"context_layer\.sub_vert_w_fc\.0", "from_subject"),
    (r"context_layer\.obj_vert_w_fc\.0", "from_object"),
    (r"context_layer\.out_edge_w_fc\.0", "to_subject"),
    (r"context_layer\.in_edge_w_fc\.0", "to_object"),
    (r"transformer:context_layer\.", "transformer:"),
    (r"context_layer\.", "context."),
    (r"context_obj\.layer_stack", "object_encoder"),
    (r"context_edge\.layer_stack", "edge_encoder"),
    (r"slf_attn\.w_qs", "query"),
    (r"slf_attn\.w_ks", "key"),
    (r"slf_attn\.w_vs", "value"),
    (r"slf_attn\.fc", "out"),
    (r"slf_attn\.layer_norm", "attention_norm"),
    (r"pos_ffn\.w_1", "inner_in"),
    (r"pos_ffn\.w_2", "inner_out"),
    (r"pos_ffn\.layer_norm", "inner_norm"),
    (r"obj_embed1", "embed_in"),
    (r"obj_embed2", "embed_out"),
    (r"bbox_embed|pos_embed", "position"),
    (r"lin_obj_h", "object_out"),
    (r"lin_edge_h", "edge_out"),
    (r"lin_obj", "object_in"),
    (r"lin_edge", "edge_in"),
    (r"decoder_rnn\.obj_embed", "decoder.embed"),
    (r"decoder_rnn\.decoderLSTM\.px", "decoder.lstm.direct"),
    (r"decoder_rnn\.decoderLSTM\.iofux", "decoder.lstm.input"),
    (r"decoder_rnn\.decoderLSTM\.iofuh", "decoder.lstm.state"),
    (r"decoder_rnn\.decoderLSTM\..*", "-"),  # the shared embedding and output, listed a second time
    (r"decoder_rnn\.input_linearity", "decoder.input"),
    (r"decoder_rnn\.state_linearity", "decoder.state"),
    (r"decoder_rnn\.out(_obj)?", "decoder.out"),
    (r"out_obj", "object_out"),
    (r"(obj|edge)_ctx_rnn\.multi_layer_lstm\.0\.treeLSTM_foreward\.treeLSTM", r"\1_lstm.up"),
    (r"(obj|edge)_ctx_rnn\.multi_layer_lstm\.0\.treeLSTM_backward\.treeLSTM", r"\1_lstm.down"),
    (r"\.px\.", ".direct."),
    (r"\.(ioffux|iofux)\.", ".input."),
    (r"\.ioffuh_(left|right)\.", r".\1."),
    (r"\.iofuh\.", ".state."),
    (r"obj_lstm|obj_ctx_rnn", "object_lstm"),
    (r"edge_ctx_rnn", "edge_lstm"),
    (r"context\.bi_freq_prior", "context.scores.prior"),
    (r"context\.overlap_embed", "context.scores.overlap"),
    (r"context\.box_embed", "context.scores.box"),
    (r"context\.obj_reduce", "context.scores.roi"),
    (r"context\.emb_reduce", "context.scores.word"),
    (r"context\.score_pre", "context.scores.joined"),
    (r"context\.score_sub", "context.scores.subject"),
    (r"context\.score_obj", "context.scores.object"),
    (r"context\.vision_prior", "context.scores.vision"),
    (r"context\.pred_layer", "context.object_out"),
    (r"context\.fc_layer", "context.edge_out"),
    (r"post_emb", "split"),
    (r"post_cat(\.0)?", "join"),
    (r"spt_emb", "positions"),
    (r"ctx_gate_fc", "gate"),
    (r"vis_compress", "visual_out"),
    (r"(causal\w*|transformer):ctx_compress", r"\1:context_out"),
    (r"transformer:rel_compress", "transformer:visual_out"),
    (r"ctx_compress|rel_compress", "out"),
    (r"freq_bias\.obj_baseline", "frequency.table"),
    (r"up_dim", "union"),
]


def our_name(head: str, name: str) -> str | None:
    """Return our name for a tensor of the original's predictor, or None for tensors that do not exist here: buffers
    that are not read, and shared parameters listed twice.

    head: motif, vctree, imp, transformer, causal_motifs, causal_vctree or causal_vtranse.
    """
    if name in DEAD or (name == DEAD_UNLESS_VTRANSE and "vtranse" not in head):
        return None
    if name in DEAD_UNLESS_CAUSAL and not head.startswith("causal"):
        return None
    name = f"{head}:{name}"
    for pattern, ours in NAME_PATTERNS:
        name = re.sub(pattern, ours, name)
    name = name.split(":", 1)[1]
    return None if name.endswith("-") else name


def head_of(state: Mapping[str, Tensor]) -> tuple[str, dict]:
    """Return the kind of a relation head, in the terms of `our_name`, and its settings, recognised by the names of its
    tensors. Raises IncompleteWeights if they are not those of a known head."""
    if "context_layer.node_gru.weight_ih" in state:
        return "imp", {}
    if "context_layer.context_obj.layer_stack.0.slf_attn.w_qs.weight" in state:
        return "transformer", transformer_options(state, KEY_DIM)
    tree, translates = (f"context_layer.{name}.weight" in state for name in ("score_sub", "pred_layer"))
    if not translates:  # the layer for the objects' labels; SGG-Benchmark left it out
        required(state, "context_layer.decoder_rnn.obj_embed.weight")
    if "vis_compress.weight" in state:
        context = "vctree" if tree else "vtranse" if translates else "motifs"
        options = {"context": context, "fusion": "gate" if "ctx_gate_fc.weight" in state else "sum"}
        return f"causal_{context}", options | {"use_positions": "spt_emb.0.weight" in state}
    if tree:
        return "vctree", {}
    required(state, "context_layer.obj_ctx_rnn.weight_ih_l0")
    required(state, "rel_compress.weight")
    return "motif", {}


def transformer_options(state: Mapping[str, Tensor], key_dim: int) -> dict:
    """Return the settings of a transformer head whose attention heads have `key_dim` channels."""
    layers = [name for name in state if name.endswith("slf_attn.w_qs.weight")]
    first = layers[0].removesuffix("slf_attn.w_qs.weight")
    heads = len(required(state, layers[0], 2)) // key_dim
    if not heads:
        raise IncompleteWeights(f"has {layers[0]} of less than {key_dim} rows, those of one attention head")
    return {
        "object_layers": sum("context_obj" in name for name in layers),
        "edge_layers": sum("context_edge" in name for name in layers),
        "heads": heads,
        "key_dim": key_dim,
        "value_dim": len(required(state, f"{first}slf_attn.w_vs.weight", 2)) // heads,
        "inner_dim": len(required(state, f"{first}pos_ffn.w_1.weight", 3)),
    }


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, a dot at its end included, without the prefix."""
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    """Describe the scene graph that the tensors belong to. Raises BadInput for a head or features that are not
    supported."""
    missing = [name for name in (STEM, CLASSIFIER) if name not in state]
    if missing:
        raise BadInput(
            f"model.pretrained {file}: a relation head on a detector that is not a Faster R-CNN of "
            f"maskrcnn-benchmark (it has no {missing[0]}), such as SGG-Benchmark's on detectors of ultralytics; "
            "train a head on a detector of yours instead: scripts/train_sgg.py --model.detector RUN "
            "--model.head react"
        )
    predictor = below(state, PREDICTOR)
    try:
        head, head_options = head_of(predictor)
    except IncompleteWeights as error:
        raise BadInput(
            f"model.pretrained {file}: an unknown relation head (it {error}); supported are those "
            "of Motifs, VCTree, IMP, Transformer and CausalAnalysis. --model.detector takes its detector"
        ) from error
    faults = ["attributes (ATTRIBUTE_ON)"] * any(".att_feature_extractor." in name for name in state)
    faults += ["CONTEXT_POOLING_DIM other than MLP_HEAD_DIM"] * ("up_dim.weight" in predictor)
    if faults:
        raise BadInput(f"model.pretrained {file}: a relation head with {', '.join(faults)}: not supported")
    (detector,) = MASKRCNN_BENCHMARK.described(state, file)
    union = f"{RELATION}union_feature_extractor."
    outputs = [f"{name}.weight" for name in ("ctx_compress", "rel_compress", "context_layer.rel_fc")]
    output = next((name for name in outputs if name in predictor), outputs[0])
    num_predicates = len(required(predictor, output, 2)) - 1
    words = "context_layer.obj_embed1.weight"
    if "post_emb.weight" in predictor:
        hidden = required(predictor, "post_emb.weight", 2).shape[1]
    else:
        hidden = len(required(predictor, "context_layer.obj_unary.weight", 2))
    options = {
        "mode": "sgdet",
        "head": {"motif": "motifs"}.get(head, head.split("_")[0]),
        "head_options": head_options,
        "hidden_dim": hidden,
        "embed_dim": required(predictor, words, 2).shape[1] if words in predictor else 200,
        "union_levels": "all" if f"{union}feature_extractor.pooler.reduce_channel.0.weight" in state else "one",
        "separate_spatial": SPATIAL in state,
        "whole_pixels": True,
        "predicates": named_predicates(num_predicates),
        "freeze": "detector",
        "detector_options": {
            "architecture": detector.architecture,
            **detector.options,
            **DETECTOR_OPTIONS,
        },
    }
    note = "the file does not say how it was trained: mode sgdet, unless --model.mode says otherwise"
    notes = [*detector.notes, note]
    classes = class_names_for(len(required(state, CLASSIFIER, 2)) - 1)
    without_our_name = f"^{re.escape(RELATION)}"
    return [Description("scene_graph", options, classes, notes, IMAGE_SIZE, needless=without_our_name)]


def by_our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the publisher's tensors under our names; those without a counterpart keep their own names."""
    predictor = below(state, PREDICTOR)
    head = head_of(predictor)[0]
    of_detector = {}
    of_features = {}
    for name, value in state.items():
        if not name.startswith(RELATION):
            of_detector[name] = value
        elif not name.startswith(PREDICTOR):
            of_features[name] = value
    detector = MASKRCNN_BENCHMARK.ours_from(of_detector)
    ours = {f"detector.{name}": value for name, value in detector.items()}
    ours |= renamed(of_features, FEATURES)
    for name, value in predictor.items():
        is_convolution = re.search(r"pos_ffn\.w_\d\.weight$", name)  # of width 1
        flat = required(predictor, name, 3)[..., 0] if is_convolution else value
        apart = name == CONV_POSITIONS and SPATIAL in state
        into = "mean_spatial.value" if apart else our_name(head, name)
        ours[PREDICTOR + name if into is None else f"head.{into}"] = flat
    return ours


def named_predicates(rows: int) -> list[str]:
    """Return names for this many predicates, without "no relation": VG150's if there are 50, else numbered ones."""
    return list(VG_50) if rows == 50 else [f"predicate {i}" for i in range(rows)]


SCENE_GRAPH_BENCHMARK = Publisher(
    "Scene-Graph-Benchmark",
    _described,
    (PREDICTOR,),
    prepared=by_our_names,
    left_out="^$",
    optional=r"^(relation_counts|candidate_counts|seen_triplets|predicate_weights)$|num_batches_tracked$",
)
