"""The names of everything outside the core: detectors, readers, augmentation recipes, publishers of weights, tools.

The core does not import these modules. It looks up a name here and loads the module when it is needed: `--help` loads
no detector, and a run loads only its own. A new detector family is a folder below `toolkit/detectors/` and a line in
each of the tables here that concern the family.

References are `module:attribute`.
"""

import difflib
import importlib
from typing import Any

_DETR = "toolkit.detectors.detr"
_FASTER_RCNN = "toolkit.detectors.faster_rcnn"
_SCENE_GRAPHS = "toolkit.detectors.scene_graphs"
_SSD = "toolkit.detectors.ssd"
_YOLOV3 = "toolkit.detectors.yolov3"

# The names of `from toolkit import ...`.
FACE = {
    "Boxes": "toolkit.base.boxes:Boxes",
    "CocoEvaluator": "toolkit.evaluation.coco:CocoEvaluator",
    "Detector": "toolkit.models.detector:Detector",
    "LossWeights": "toolkit.step.losses:LossWeights",
    "Meters": "toolkit.step.meters:Meters",
    "NanGuard": "toolkit.step.guard:NanGuard",
    "open_dataset": "toolkit.data.formats:open_dataset",
    "open_predictor": "toolkit.tools.predict.open:open_predictor",
    "reduce_dict": "toolkit.base.distributed:reduce_dict",
    "session": "toolkit.run.session:session",
}

# model.architecture -> the class of the detector and the dataclass of its settings.
DETECTORS = {
    "detr": (f"{_DETR}.detr:Detr", f"{_DETR}.options:DetrOptions"),
    "conditional_detr": (f"{_DETR}.conditional_detr:ConditionalDetr", f"{_DETR}.options:ConditionalDetrOptions"),
    "deformable_detr": (f"{_DETR}.deformable_detr:DeformableDetr", f"{_DETR}.options:DeformableDetrOptions"),
    "dab-detr": (f"{_DETR}.conditional_detr:DabDetr", f"{_DETR}.options:DabDetrOptions"),
    "rf_detr": (f"{_DETR}.rf_detr:RfDetr", f"{_DETR}.options:RfDetrOptions"),
    "lw_detr": (f"{_DETR}.lw_detr:LwDetr", f"{_DETR}.options:LwDetrOptions"),
    "rt_detr_v2": (f"{_DETR}.rt_detr:RTDetrV2", f"{_DETR}.options:RTDetrV2Options"),
    "d_fine": (f"{_DETR}.d_fine:DFine", f"{_DETR}.options:DFineOptions"),
    "deimv2": (f"{_DETR}.deimv2:Deimv2", f"{_DETR}.options:Deimv2Options"),
    "ecdet": (f"{_DETR}.ecdet:Ecdet", f"{_DETR}.options:EcdetOptions"),
    "faster_rcnn": (f"{_FASTER_RCNN}.build:FasterRCNNOnTimm", f"{_FASTER_RCNN}.options:FasterRcnnOptions"),
    "fasterrcnn_resnet50_fpn": (
        f"{_FASTER_RCNN}.build:FasterRCNNResNet50",
        f"{_FASTER_RCNN}.options:ResNet50Options",
    ),
    "fasterrcnn_resnet50_fpn_v2": (
        f"{_FASTER_RCNN}.build:FasterRCNNResNet50V2",
        f"{_FASTER_RCNN}.options:ResNet50V2Options",
    ),
    "scene_graph": (f"{_SCENE_GRAPHS}.two_stage:SceneGraph", f"{_SCENE_GRAPHS}.options:SceneGraphOptions"),
    "egtr": (f"{_SCENE_GRAPHS}.egtr:EGTR", f"{_SCENE_GRAPHS}.options:EgtrOptions"),
    "yolov3": (f"{_YOLOV3}.model:YOLOv3", f"{_YOLOV3}.options:Yolov3Options"),
    "ssd": (f"{_SSD}.model:SSD", f"{_SSD}.options:SsdOptions"),
    "ssd300_vgg16": (f"{_SSD}.model:SSD300", f"{_SSD}.options:Ssd300Options"),
    "ssdlite320_mobilenet_v3_large": (f"{_SSD}.model:SSDLite320", f"{_SSD}.options:Ssdlite320Options"),
    "ssdlite": (f"{_SSD}.model:SSDLite", f"{_SSD}.options:SsdliteOptions"),
}

# data.format -> the function that opens one split, `(source, reading) -> table`. Folders are read by the core itself,
# `toolkit.data.formats.FOLDERS`.
READERS = {
    "coco": "toolkit.data.formats.coco:read_coco",
    "shapes": "toolkit.tools.shapes:open_shapes",
    "hub": "toolkit.data.formats.hub:open_named",
}
READERS |= dict.fromkeys(("visual_genome", "psg", "vrd", "gqa", "open_images"), f"{_SCENE_GRAPHS}.readers:open_graphs")

# data.recipe -> what makes the training augmentation; "detr" is the core's own.
RECIPES = {"ssd": f"{_SSD}.transforms:SsdTransform", "yolov3": f"{_YOLOV3}.transforms:yolov3_transform"}

# Publishers of weights, in the order in which they are tried for a file.
PUBLISHERS = (
    f"{_FASTER_RCNN}.weights_torchvision:FASTER_RCNN",
    f"{_FASTER_RCNN}.weights_torchvision:FASTER_RCNN_V2",
    f"{_SSD}.weights_torchvision:SSD300",
    f"{_SSD}.weights_torchvision:SSDLITE320",
    f"{_SCENE_GRAPHS}.weights_scene_graph_benchmark:SCENE_GRAPH_BENCHMARK",
    f"{_FASTER_RCNN}.weights_maskrcnn_benchmark:MASKRCNN_BENCHMARK",
    f"{_DETR}.weights_detr:DETR",
    f"{_DETR}.weights_detr:CONDITIONAL_DETR",
    f"{_DETR}.weights_detr:DAB_DETR",
    f"{_DETR}.weights_detr:DEFORMABLE_DETR",
    f"{_DETR}.weights_rt_detr:D_FINE",
    f"{_DETR}.weights_deimv2:DEIMV2",
    f"{_DETR}.weights_ecdet:ECDET",
    f"{_DETR}.weights_rt_detr:RT_DETR",
    f"{_DETR}.weights_rf_detr:RF_DETR",
    f"{_DETR}.weights_lw_detr:LW_DETR",
    f"{_YOLOV3}.weights_darknet:DARKNET",
    f"{_YOLOV3}.weights_gluoncv:GLUONCV",
)
# Endings of files of weights that PyTorch and safetensors do not write -> the function that reads their tensors.
WEIGHT_FILES = {
    ".params": f"{_YOLOV3}.weights_gluoncv:read",
    ".weights": f"{_YOLOV3}.weights_darknet:read",
}

# run.tracker -> the class that shows a run there; every other name is one of Accelerate's.
TRACKERS = {
    "wandb": "toolkit.tools.trackers.weights_and_biases:WandbTracker",
    "tensorboard": "toolkit.tools.trackers.event_file:TensorBoardTracker",
}
OTHER_TRACKERS = "toolkit.tools.trackers.of_accelerate:AccelerateTracker"

# The functions that a run calls if its settings request them, if its figures call for them, or if the NaN guard refuses
# a window.
TOOLS = {
    "hold_out": "toolkit.tools.doctor.near_duplicates:hold_out",
    "probe_memory": "toolkit.tools.memory_probe:probe_memory",
    "investigate": "toolkit.tools.replay.nan_report:investigate",
    "teacher": "toolkit.tools.distillation.teacher:open_teacher",
    "explain_zero_ap": "toolkit.tools.report.explain:explain_zero_ap",
    "shown": "toolkit.tools.report.evaluation_display:shown_evaluation",
    "report": "toolkit.tools.publish.push:report_and_card",
    "model_card": "toolkit.tools.publish.card:write_card",
    "check_export": "toolkit.tools.export.write:check_exportable",
    "try_export": "toolkit.tools.export.write:try_export",
    "export": "toolkit.tools.export.write:export_final",
    "check_push": "toolkit.tools.publish.push:check_push",
    "push": "toolkit.tools.publish.push:push",
}
# Statistics of a report that only some detectors' predictions have.
REPORT_STATISTICS = {"relations": f"{_SCENE_GRAPHS}.graph_report:judge_graphs"}


def load(reference: str) -> Any:
    """Import the module of a reference, `module:attribute`, and return the attribute, which can itself be a module.

    Raises:
        ImportError, AttributeError, ValueError: the module or attribute does not exist, or the reference is malformed.
    """
    module, _, name = reference.partition(":")
    found = importlib.import_module(module)
    if hasattr(found, name):
        return getattr(found, name)
    if not hasattr(found, "__path__"):
        alike = [other for other in vars(found) if other[0].isupper() == name[:1].isupper()]  # classes for a class
        written = {other.lower(): other for other in alike}
        similar = difflib.get_close_matches(name.lower(), written, n=1)
        hint = f"; the nearest name is {written[similar[0]]}" if similar else ""
        raise AttributeError(f"{module} has no {name or 'attribute without a name'}{hint}")
    return importlib.import_module(f"{module}.{name}")  # a module of a package, which nothing has imported yet


def tool(name: str) -> Any:
    """Load the function of this name in `TOOLS`. Raises KeyError for another name."""
    return load(TOOLS[name])
