"""A picture of every image with what is right, wrong and missed, and the list of them."""

import csv

from PIL import Image
from report_data import predictions_of, table_of

from toolkit.tools.report.image_files import names_of_pictures, write_image_files

BOX = [20, 20, 60, 60]
FAR = [100, 70, 140, 110]


def test_every_image_has_a_picture_and_a_row(tmp_path):
    table = table_of(tmp_path / "data", [[(BOX, 0)], [(BOX, 0), (FAR, 1)], [], [(BOX, 0)]])
    (tmp_path / "data" / "3.png").unlink()
    found = [[(BOX, 0, 0.9)], [(BOX, 0, 0.8), (BOX, 1, 0.7)], [], [(BOX, 0, 0.9)]]
    said = write_image_files(tmp_path / "out", predictions_of(table, found), table)
    assert said.startswith("pictures: 3 in")
    assert said.endswith("; 1 images cannot be read")
    with (tmp_path / "out" / "images.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert rows[0] == {"image": "1.png", "picture": "1.jpg", "right": "1", "wrong": "0", "missed": "1", "f1": "0.6667"}
    assert {row["image"]: row["picture"] for row in rows[1:]} == {"0.png": "0.jpg", "2.png": "2.jpg", "3.png": ""}
    picture = Image.open(tmp_path / "out" / "1.jpg")
    assert picture.size == (480, 360), "an image of 160 x 120 px is enlarged, so that letters fit"


def test_names_of_pictures_stay_in_their_folder_and_differ():
    names = names_of_pictures(["a/1.png", "a/1.tif", "../b.png", "/c/d.jpg", "row 3"])
    assert names == ["a/1.jpg", "a/1_2.jpg", "b.jpg", "c/d.jpg", "row 3.jpg"]
