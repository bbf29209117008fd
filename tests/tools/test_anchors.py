"""The command that computes anchors for a data set."""

import pytest
import torch
import yaml
from documents import box, document, image, write
from torchvision.io import write_png
from yolov3_data import tiny

from toolkit.base.errors import BadInput
from toolkit.tools.anchors import main

# 20 x 10, twice and four times that of an image of 200 x 100; and one without width.
BOXES = [
    [
        i,
        i,
        20 * k,
        10 * k,
    ]
    for k in (1, 2, 4)
    for i in range(4)
] + [[5, 5, 0, 10]]


def annotations(folder, boxes):
    write_png(torch.zeros(3, 100, 200, dtype=torch.uint8), str(folder / "a.png"))
    listed = [box(id=number, bbox=each) for number, each in enumerate(boxes, 1)]
    return write(
        folder,
        document(
            images=[
                image(
                    file_name="a.png",
                    width=200,
                    height=100,
                )
            ],
            annotations=listed,
        ),
    )


@pytest.fixture
def anchors(tmp_path, capsys):
    """`anchors(...)`: exit code, and what the command prints."""
    file = annotations(tmp_path, BOXES)
    command = ["--annotations", str(file), "--image-dir", str(tmp_path), "--per-level", "1", "--image-size"]

    def call(*arguments):
        code = main([*command, *arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (
            ["64"],
            [
                [[25.6, 25.6]],
                [[12.8, 12.8]],
                [[6.4, 6.4]],
            ],
        ),
        (
            ["64", "32"],
            [
                [[12.8, 25.6]],
                [[6.4, 12.8]],
                [[3.2, 6.4]],
            ],
        ),
    ],
    ids=["square", "height and width"],
)
def test_anchors_are_sizes_at_the_networks_input(anchors, size, expected):
    code, printed = anchors(*size, "--on-error", "drop")
    assert code == 0
    found = yaml.safe_load(printed)["anchors"]
    assert found == expected
    assert tiny(anchors=found).predictions[0].out_channels == 8


@pytest.mark.parametrize(
    ("arguments", "words"), [(["64"], "annotation 13"), (["64", "32", "3"], "--image-size 64 32 3: expected")]
)
def test_bad_input_is_named(anchors, arguments, words):
    code, printed = anchors(*arguments)
    assert code == BadInput.exit_code
    assert words in printed


def test_sides_below_one_pixel_and_too_few_boxes_are_named(anchors, tmp_path, capsys):
    with pytest.raises(SystemExit):
        anchors("0")
    assert "0: expected a whole number above 0" in capsys.readouterr().err
    assert main(["--annotations", str(annotations(tmp_path, [[1, 1, 20, 10]]))]) == BadInput.exit_code
    assert "1 boxes" in capsys.readouterr().err
