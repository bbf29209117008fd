"""Images in several folders, archives and object storage: the same table, pixels and batches as from one folder."""

import io
import json
import multiprocessing
import os
import shutil
import struct
import sys
import tarfile
import tracemalloc
import zipfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from scripts import check_data
from toolkit.base.errors import BadInput
from toolkit.data import image_sources
from toolkit.data.dataset import DetectionDataset
from toolkit.data.decoding import ImageError, decode_image, probe_image
from toolkit.data.formats import open_dataset
from toolkit.data.formats.coco import listed_names
from toolkit.data.image_sources import ImageSources, open_sources
from toolkit.data.pipeline import loader_of_settings
from toolkit.data.sampling import SampleKey
from toolkit.data.transforms.geometry import exact_transform
from toolkit.run.settings import DataConfig
from toolkit.tools.shapes import make_shapes
from toolkit.tools.writers import write_folder


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    image_sources._storage.cache_clear()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """(annotation file, folder of 12 images)."""
    folder = tmp_path_factory.mktemp("shapes") / "d"
    make_shapes(folder, 12, 1, 48)
    return folder / "annotations" / "train.json", folder / "train"


def zipped(path: Path, files: dict[str, bytes], method=zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tarred(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def packed(kind: str, folder: Path, target: Path):
    """`data.image_dir` of a copy of a folder's files in another kind of place."""
    files = sorted(folder.iterdir())
    if kind == "two folders":
        for part in (0, 1):
            (target / f"part{part}").mkdir(parents=True)
            for file in files[part::2]:
                shutil.copy(file, target / f"part{part}")
        return [str(target / "part0"), str(target / "part1")]
    if kind == "folder and zip":
        first, second = packed("two folders", folder, target)
        return [first, packed("zip", Path(second), target)]
    contents = {file.name: file.read_bytes() for file in files}
    if kind == "zip":
        return str(zipped(target / "images.zip", contents))
    if kind == "zip folder":
        return f"{zipped(target / 'images.zip', {f'top/{name}': data for name, data in contents.items()})}/top"
    if kind == "tar":
        return str(tarred(target / "images.tar", {f"./{name}": data for name, data in contents.items()}))
    if kind == "file URL":
        return folder.as_uri()
    fsspec.filesystem("memory").pipe({f"/{target.name}/{name}": data for name, data in contents.items()})
    return f"memory://{target.name}"


KINDS = ("two folders", "folder and zip", "zip", "zip folder", "tar", "file URL", "memory URL")


@pytest.mark.parametrize("kind", KINDS)
def test_everywhere_the_same(shapes, tmp_path, kind):
    file, folder = shapes
    image_dir = packed(kind, folder, tmp_path)
    plain, other = open_dataset(file, image_dir=folder), open_dataset(file, image_dir=image_dir)
    assert isinstance(other.image_root, ImageSources) and other.fingerprint == plain.fingerprint and not other.problems
    copy = ForkingPickler.loads(ForkingPickler.dumps(other))  # as a spawned worker gets it
    for index in range(len(plain)):
        row = plain.row(index)
        assert torch.equal(decode_image(plain.image_source(row)), decode_image(copy.image_source(copy.row(index))))
        assert probe_image(other.image_source(row)) == probe_image(plain.image_source(row))
    again = open_dataset(file, image_dir=image_dir)
    assert again.image_root == other.image_root and again.arrow_files == other.arrow_files


@pytest.mark.parametrize("kind", ["folder and zip", "memory URL"])
def test_batches_and_their_continuation_are_the_same(shapes, tmp_path, kind):
    file, folder = shapes

    def batches(image_dir, workers, done):
        table = open_dataset(file, image_dir=image_dir)
        settings = DataConfig(image_size=32, photometric=True, batch_size_per_device=2, workers=workers)
        sampler, loader = loader_of_settings(table, settings, seed=3, stride=1)
        sampler.advance(2 * done)
        return [batch.images for batch in loader]

    expected = batches(folder, 0, 0)
    for workers, done in ((0, 0), (2, 2)):
        (tmp_path / str(workers)).mkdir()
        found = batches(packed(kind, folder, tmp_path / str(workers)), workers, done)
        assert len(found) == len(expected) - done
        assert all(map(torch.equal, found, expected[done:]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_another_size_is_refused_wherever_it_lies(shapes, tmp_path, kind):
    file, folder = shapes
    document, name = json.loads(file.read_text()), sorted(path.name for path in folder.iterdir())[0]
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    Image.new("RGB", (20, 10)).save(other / name)
    table = open_dataset(file, image_dir=packed(kind, other, tmp_path), check_images=False)
    index = [entry["file_name"] for entry in document["images"]].index(name)
    dataset = DetectionDataset(table, exact_transform(32))
    dataset[SampleKey(0, (index + 1) % len(dataset))]
    with pytest.raises(BadInput, match=rf"{name}: the picture has 20 x 10 pixels .*but 48 x 48 by the annotations"):
        dataset[SampleKey(0, index)]


def test_a_changed_archive_is_read_anew(shapes, tmp_path):
    file, folder = shapes
    image_dir = packed("zip", folder, tmp_path)
    open_dataset(file, image_dir=image_dir)
    with zipfile.ZipFile(image_dir, "a") as archive:
        archive.writestr("more.jpg", next(folder.iterdir()).read_bytes())
    problems = [str(problem) for problem in open_dataset(file, image_dir=image_dir).problems]
    assert problems == ["warning: more.jpg: file not listed in the annotation file; not used"]


def test_what_is_no_file_name_is_passed_over(tmp_path):
    (tmp_path / "a.json").write_text('{"images": [3, {"file_name": 4}, {}, {"file_name": "b.jpg"}]}')
    assert list(listed_names(tmp_path / "a.json")) == ["b.jpg"]


def test_defects_name_the_place(shapes, tmp_path):
    file, folder = shapes
    image_dir = packed("folder and zip", folder, tmp_path)
    names = [entry["file_name"] for entry in json.loads(file.read_text())["images"]]
    whole, at = Path(image_dir[1]).read_bytes(), zipfile.ZipFile(image_dir[1]).getinfo(names[1]).header_offset + 80
    Path(image_dir[1]).write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])  # a flipped byte
    (Path(image_dir[0]) / names[0]).unlink()
    shutil.copy(folder / names[3], image_dir[0])
    shutil.copy(folder / names[4], Path(image_dir[0]) / names[5])
    table = open_dataset(file, image_dir=image_dir, on_error="drop")
    told = {problem.file: f"{problem.severity} {problem.message}" for problem in table.problems}
    assert told[names[0]] == f"error image file not found in any of {', '.join(image_dir)}"
    assert told[names[1]].startswith("error image file cannot be read: damaged")
    assert told[names[3]] == f"warning this file is in {image_dir[0]} and in {image_dir[1]}; the first one is used"
    assert told[names[5]].startswith(f"error different files of this name are in {image_dir[0]} and in {image_dir[1]}")
    assert len(table) == 9 and len(told) == 4
    with pytest.raises(ImageError, match="images.zip/nothing.jpg: image file not found in .*images.zip"):
        decode_image(open_sources(image_dir[1]) / "nothing.jpg")
    stored = zipped(tmp_path / "stored.zip", {"a.jpg": b"12345678"}, zipfile.ZIP_STORED)
    stored.write_bytes(stored.read_bytes().replace(b"12345678", b"12345679"))
    with pytest.raises(ImageError, match="damaged: Bad CRC-32"):
        decode_image(open_sources(stored) / "a.jpg")
    zipped(tmp_path / "big.zip", {"big.jpg": bytes(2**26 + 17)})
    with pytest.raises(ImageError, match="more than the .* of any image of data.max_image_pixels"):
        decode_image(open_sources(tmp_path / "big.zip") / "big.jpg", max_pixels=1)


def test_links_in_archives_and_out_of_folders(shapes, tmp_path):
    """A hard link in a tar is its target, a symbolic link is left out; a link out of a folder is followed."""
    file, folder = shapes
    first, second = packed("two folders", folder, tmp_path)
    names = sorted(path.name for path in folder.iterdir())
    with tarfile.open(tmp_path / "linked.tar", "w") as archive:
        archive.add(folder / names[1], names[1])
        link = tarfile.TarInfo("again.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, names[1]
        archive.addfile(link)
        link = tarfile.TarInfo("out.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, str(folder / names[2])
        archive.addfile(link)
    assert not open_sources(tmp_path / "linked.tar").parts[0].holds("out.jpg")
    opened = open_sources(tmp_path / "linked.tar")
    assert (opened / "again.jpg").read_bytes() == (folder / names[1]).read_bytes()
    (Path(first) / names[0]).unlink()
    (Path(first) / names[0]).symlink_to(folder / names[0])
    table = open_dataset(file, image_dir=[first, second], on_error="drop")
    (note,) = table.problems
    assert note.message == f"1 of 12 images are links to files elsewhere, which are read: {names[0]}"
    assert len(table) == 12


def test_places_that_cannot_be_are_told_together(tmp_path):
    (tmp_path / "a.txt").write_text("no archive")
    (tmp_path / "a.tar.gz").write_bytes(b"")
    whole = zipped(tmp_path / "a.zip", {"train/1.jpg": b"1", "2.jpg": b"2"}).read_bytes()
    zipped(tmp_path / "lzma.zip", {"1.jpg": b"1"}, zipfile.ZIP_LZMA)
    (tmp_path / "cut.zip").write_bytes(whole[:-30])
    wrong = {
        "nowhere": "no such image folder",
        "a.txt": "neither a folder nor an archive",
        "a.tar.gz": "make a .tar or a .zip of it",
        "a.zip/val": "no such folder in the archive; at its top are 2.jpg, train",
        "lzma.zip": "1.jpg is packed by method 14",
        "cut.zip": "neither a folder nor an archive",
    }
    urls = {"memory://nothing/here": "no files there", "nosuch://x": "cannot be listed: Protocol not known"}
    with pytest.raises(BadInput) as raised:
        open_sources([*(str(tmp_path / name) for name in wrong), *urls])
    for told, (name, words) in zip(raised.value.problems, (wrong | urls).items(), strict=True):
        assert name.split("/")[0] in told and words in told
    with pytest.raises(BadInput, match="an empty list"):
        open_sources([])


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at the open files of the process")
def test_a_forked_process_does_not_move_the_position_in_an_archive(tmp_path):
    """The position in a file that was open before the fork belongs to both processes."""
    contents = {str(number): bytes([number]) * 20_000 for number in range(9)}
    file = zipped(tmp_path / "a.zip", contents, zipfile.ZIP_STORED)
    opened = open_sources(file)
    assert (opened / "0").read_bytes() == contents["0"]

    def positions() -> list[int]:
        links = [link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(file)]
        return [os.lseek(int(link.name), 0, os.SEEK_CUR) for link in links]

    def reading() -> None:
        sys.exit((opened / "8").read_bytes() != contents["8"])

    before = positions()
    reader = multiprocessing.get_context("fork").Process(target=reading)
    reader.start()
    reader.join()
    assert reader.exitcode == 0
    assert positions() == before


def test_no_more_of_a_member_is_unpacked_than_the_archive_says(tmp_path):
    """A size that is wrong by a thousandfold is found without the memory for the content."""
    file = zipped(tmp_path / "a.zip", {"a.jpg": bytes(2**26)})
    directory = file.read_bytes().rindex(b"PK\1\2")
    with open(file, "r+b") as archive:
        archive.seek(directory + 24)  # the size unpacked
        archive.write(struct.pack("<L", 2**16))
    source = open_sources(file) / "a.jpg"
    tracemalloc.start()
    with pytest.raises(OSError, match="damaged: Bad CRC-32"):
        source.read_bytes()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


@settings(max_examples=25)
@given(
    files=st.dictionaries(st.text("ab/", min_size=1).filter(lambda n: n.strip("/") == n and "//" not in n),
                          st.binary(max_size=300), min_size=1, max_size=6),
    method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, None]),
)  # fmt: skip
def test_members_are_what_was_put_in(tmp_path_factory, files, method):
    folder = tmp_path_factory.mktemp("members")
    if method is None:
        tarred(folder / "x.tar", files)
    else:
        zipped(folder / "x.zip", files, method)
    opened = open_sources(next(folder.iterdir()))
    assert {name: (opened / name).read_bytes() for name in opened.parts[0].entries} == files


def test_voc_and_csv_with_images_in_an_archive(shapes, tmp_path):
    file, folder = shapes
    image_dir, table = packed("zip", folder, tmp_path), open_dataset(file, image_dir=folder)
    for format in ("voc", "csv", "yolo"):
        write_folder(table, tmp_path / format, "train", format)
    for format, images in (("voc", "JPEGImages"), ("csv", "images")):
        shutil.rmtree(tmp_path / format / images)
        read = open_dataset("train", path=tmp_path / format, image_dir=image_dir)
        assert len(read) == len(table) and read.num_boxes().tolist() == table.num_boxes().tolist()
    with pytest.raises(BadInput, match="YOLO data are listed by their image files"):
        open_dataset("train", path=tmp_path / "yolo", image_dir=image_dir)


def test_check_data_and_its_clean_copy(shapes, tmp_path, monkeypatch, capsys):
    file, folder = shapes
    first, second = packed("two folders", folder, tmp_path)
    broken = sorted(Path(second).iterdir())[0]
    Image.new("RGB", (9, 9)).save(broken)
    image_dir = packed("tar", Path(second), tmp_path)
    options = ["--image-dir", first, "--image-dir", image_dir, "--fix", str(tmp_path / "fixed")]
    assert check_data.main([str(file), *options]) == 2
    assert "size differs from the JSON: the upright image is 9 x 9" in capsys.readouterr().out
    assert check_data.main([str(tmp_path / "fixed")]) == 0
    copied = list((tmp_path / "fixed" / "train").iterdir())
    assert len(copied) == 11 and all(path.read_bytes() == (folder / path.name).read_bytes() for path in copied)
