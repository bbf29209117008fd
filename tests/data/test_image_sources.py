"""Images in several folders, archives and object storage: the same table, pixels and batches as from one folder."""

import io
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
from dirty_sets import check_set, sets_in
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data import image_sources
from toolkit.data.dataset import DetectionDataset
from toolkit.data.decoding import ImageError, decode_image, probe_image
from toolkit.data.formats import open_dataset
from toolkit.data.image_sources import ImageSources, open_sources
from toolkit.data.pipeline import loader_of_settings
from toolkit.data.sampling import SampleKey
from toolkit.data.transforms.geometry import exact_transform
from toolkit.run.settings import DataConfig
from toolkit.tools.shapes import make_shapes

COUNT = 8
KINDS = (
    "two folders",
    "folder and zip",
    "zip",
    "zip folder",
    "tar",
    "file URL",
    "memory URL",
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    image_sources._storage.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "d"
    make_shapes(folder, COUNT, 1, 48)
    return folder / "train"


@pytest.fixture(scope="module")
def file(folder) -> Path:
    return folder.parent / "annotations" / "train.json"


@pytest.fixture(scope="module")
def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


def two_folders(folder: Path, target: Path) -> list[str]:
    places = [target / "part0", target / "part1"]
    for number, file in enumerate(sorted(folder.iterdir())):
        place = places[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    return list(map(str, places))


def packed(kind: str, folder: Path, target: Path):
    """Return `data.image_dir` of a copy of a folder's files in another kind of place."""
    contents = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    if kind == "two folders":
        return two_folders(folder, target)
    if kind == "folder and zip":
        first, second = two_folders(folder, target)
        return [first, packed("zip", Path(second), target)]
    if kind == "zip":
        return str(zipped(target / "images.zip", contents))
    if kind == "zip folder":
        below = {f"top/{name}": content for name, content in contents.items()}
        return f"{zipped(target / 'images.zip', below)}/top"
    if kind == "tar":
        dotted = {f"./{name}": content for name, content in contents.items()}
        return str(tarred(target / "images.tar", dotted))
    if kind == "file URL":
        return folder.as_uri()
    fsspec.filesystem("memory").pipe({f"/{target.name}/{name}": content for name, content in contents.items()})
    return f"memory://{target.name}"


@pytest.mark.parametrize("one", sets_in("image_places"))
def test_places(one, tmp_path):
    check_set(one, tmp_path)


# ---- everywhere the same ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_pixels_are_the_same_everywhere(file, folder, tmp_path, kind):
    image_dir = packed(kind, folder, tmp_path)
    plain = open_dataset(file, image_dir=folder)
    other = open_dataset(file, image_dir=image_dir)
    assert isinstance(other.image_root, ImageSources)
    assert other.fingerprint == plain.fingerprint
    assert not other.problems
    copy = ForkingPickler.loads(ForkingPickler.dumps(other))  # as a spawned worker gets it
    for index in range(len(plain)):
        row = plain.row(index)
        pixels = decode_image(copy.image_source(copy.row(index)))
        assert torch.equal(pixels, decode_image(plain.image_source(row)))
        assert probe_image(other.image_source(row)) == probe_image(plain.image_source(row))
    again = open_dataset(file, image_dir=image_dir)
    assert again.image_root == other.image_root
    assert again.arrow_files == other.arrow_files


@pytest.mark.parametrize("kind", ["folder and zip", "memory URL"])
def test_batches_and_their_continuation_are_the_same(file, folder, tmp_path, kind):
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
def test_a_picture_of_another_size_is_refused_wherever_it_lies(file, folder, names, tmp_path, kind):
    other = shutil.copytree(folder, tmp_path / "other")
    Image.new("RGB", (20, 10)).save(other / names[0])
    table = open_dataset(file, image_dir=packed(kind, other, tmp_path), check_images=False)
    index = table.file_names().index(names[0])
    dataset = DetectionDataset(table, exact_transform(32))
    dataset[SampleKey(0, (index + 1) % len(dataset))]
    with pytest.raises(
        BadInput,
        match=rf"{names[0]}: the picture has 20 x 10 pixels .*but 48 x 48 by the annotations",
    ):
        dataset[SampleKey(0, index)]


def test_a_changed_archive_is_read_anew(file, folder, names, tmp_path):
    image_dir = packed("zip", folder, tmp_path)
    open_dataset(file, image_dir=image_dir)
    with zipfile.ZipFile(image_dir, "a") as archive:
        archive.writestr("more.jpg", (folder / names[0]).read_bytes())
    problems = [str(problem) for problem in open_dataset(file, image_dir=image_dir).problems]
    assert problems == ["warning: more.jpg: file not listed in the annotation file; not used"]


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_file_that_an_archive_lacks_is_named_with_it(folder, tmp_path):
    image_dir = packed("zip", folder, tmp_path)
    with pytest.raises(ImageError, match="images.zip/nothing.jpg: image file not found in .*images.zip"):
        decode_image(open_sources(image_dir) / "nothing.jpg")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damage_is_noticed(folder, names, tmp_path, method):
    archive = zipped(tmp_path / "a.zip", {"a.jpg": (folder / names[0]).read_bytes()}, method)
    whole = bytearray(archive.read_bytes())
    whole[80] ^= 255
    archive.write_bytes(whole)
    with pytest.raises(ImageError, match="image file cannot be read: damaged"):
        decode_image(open_sources(archive) / "a.jpg")


def test_archives_that_cannot_be_read_are_told_together(tmp_path):
    whole = zipped(tmp_path / "lzma.zip", {"1.jpg": b"1"}, zipfile.ZIP_LZMA).read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:-30])
    with pytest.raises(BadInput) as raised:
        open_sources([str(tmp_path / "lzma.zip"), str(tmp_path / "cut.zip")])
    packed_otherwise, cut = raised.value.problems
    assert "1.jpg is packed by method 14" in packed_otherwise
    assert "neither a folder nor an archive" in cut


def test_a_member_larger_than_any_image_is_not_unpacked(tmp_path):
    zipped(tmp_path / "big.zip", {"big.jpg": bytes(2**26 + 17)})
    with pytest.raises(ImageError, match="more than the .* of any image of data.max_image_pixels"):
        decode_image(open_sources(tmp_path / "big.zip") / "big.jpg", max_pixels=1)


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


# ---- links, processes, members ---------------------------------------------------------------------------------------


def test_a_hard_link_in_a_tar_is_its_target_and_a_symbolic_link_is_left_out(folder, names, tmp_path):
    with tarfile.open(tmp_path / "linked.tar", "w") as archive:
        archive.add(folder / names[1], names[1])
        for name, kind, target in (
            ("again.jpg", tarfile.LNKTYPE, names[1]),
            ("out.jpg", tarfile.SYMTYPE, str(folder / names[2])),
        ):
            link = tarfile.TarInfo(name)
            link.type = kind
            link.linkname = target
            archive.addfile(link)
    opened = open_sources(tmp_path / "linked.tar")
    assert not opened.parts[0].holds("out.jpg")
    assert (opened / "again.jpg").read_bytes() == (folder / names[1]).read_bytes()


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


member = st.text("ab/", min_size=1).filter(lambda name: name.strip("/") == name and "//" not in name)


@settings(max_examples=25)
@given(
    files=st.dictionaries(member, st.binary(max_size=300), min_size=1, max_size=6),
    method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, None]),
)
def test_members_are_what_was_put_in(tmp_path_factory, files, method):
    folder = tmp_path_factory.mktemp("members")
    path = tarred(folder / "x.tar", files) if method is None else zipped(folder / "x.zip", files, method)
    opened = open_sources(path)
    assert {name: (opened / name).read_bytes() for name in opened.parts[0].entries} == files
