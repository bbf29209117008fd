"""Class names of published weights, in the order of their rows."""

COCO_80 = (
    "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign, "
    "parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, "
    "handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, "
    "surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, "
    "broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, "
    "laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, "
    "scissors, teddy bear, hair drier, toothbrush"
).split(", ")
NOT_IN_COCO = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # of the ids 1 to 90
VOC_20 = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant "
    "sheep sofa train tvmonitor"
).split()
VG_150 = (
    "airplane animal arm bag banana basket beach bear bed bench bike bird board boat book boot bottle bowl box boy "
    "branch building bus cabinet cap car cat chair child clock coat counter cow cup curtain desk dog door drawer "
    "ear elephant engine eye face fence finger flag flower food fork fruit giraffe girl glass glove guy hair hand "
    "handle hat head helmet hill horse house jacket jean kid kite lady lamp laptop leaf leg letter light logo man "
    "men motorcycle mountain mouth neck nose number orange pant paper paw people person phone pillow pizza plane "
    "plant plate player pole post pot racket railing rock roof room screen seat sheep shelf shirt shoe short "
    "sidewalk sign sink skateboard ski skier sneaker snow sock stand street surfboard table tail tie tile tire "
    "toilet towel tower track train tree truck trunk umbrella vase vegetable vehicle wave wheel window windshield "
    "wing wire woman zebra"
).split()

VG_50 = (
    "above, across, against, along, and, at, attached to, behind, belonging to, between, carrying, covered in, "
    "covering, eating, flying in, for, from, growing on, hanging from, has, holding, in, in front of, laying on, "
    "looking at, lying on, made of, mounted on, near, of, on, on back of, over, painted on, parked on, part of, "
    "playing, riding, says, sitting on, standing on, to, under, using, walking in, walking on, watching, wearing, "
    "wears, with"
).split(", ")


def coco_by_id(first: int, last: int = 90) -> list[str]:
    """Return COCO's classes for rows that are its ids, from `first`; unused ids are called `no class 12`."""
    names = iter(COCO_80)
    by_id = {i: next(names) for i in range(1, 91) if i not in NOT_IN_COCO}
    return [by_id.get(i, f"no class {i}") for i in range(first, last + 1)]


def named(rows: int) -> list[str]:
    """Return names for a classifier of `rows` classes without background; numbered if the data set is not known."""
    by_rows = {80: COCO_80, 90: coco_by_id(1), 91: coco_by_id(0), 20: VOC_20, 150: VG_150}
    return list(by_rows.get(rows) or [f"class {i}" for i in range(rows)])


def named_predicates(rows: int) -> list[str]:
    """Return names for `rows` predicates without "no relation"; numbered if the data set is not known."""
    return list(VG_50) if rows == 50 else [f"predicate {i}" for i in range(rows)]
