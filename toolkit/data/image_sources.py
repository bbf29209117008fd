"""Places that hold image files: one or several folders, zip and tar archives, object storage, or Parquet files.

A single folder is a `Path`; anything else is an `ImageSources`. For both, `root / file_name` is what `decode_image`
takes: the path of a file, or a `Stored` one. Archives and storage are listed once per process. Forked and spawned
workers share no open file, and so no position in it.
"""

import errno
import functools
import hashlib
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from toolkit.base.errors import BadInput, all_faults
from toolkit.data.sampling import MIXED_BLOCKS

ARCHIVES = (".zip", ".tar")
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
# What `zipfile` raises for a damaged member, and for one that is not there because the archive was replaced.
ZIP_DAMAGES = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, KeyError)


@dataclass(frozen=True)
class Stored:
    """A file without a path of its own, such as a member of an archive.

    container: the place that holds the file. name: its name there. size: in bytes; 0 if unknown. stamp: a text that
    changes when the content does.
    """

    container: "Archive | Storage | ImageSources | Shards"
    name: str
    size: int = 0
    stamp: str = ""

    def read_bytes(self) -> bytes:
        """Read the content. Raises OSError if the file does not exist or cannot be read."""
        return self.container.read(self.name)

    def __str__(self) -> str:
        return f"{self.container}/{self.name}"


class Folder:
    """A folder of files."""

    remote = False

    def __init__(self, root: Path):
        self.root = root
        self.real = os.path.realpath(root)

    def __str__(self) -> str:
        return str(self.root)

    def holds(self, name: str) -> bool:
        """Return whether the folder has a file of this name, which may contain subfolders."""
        return os.path.exists(self.root / name)

    def source(self, name: str) -> Path:
        """Return the path of the file of this name, whether it exists or not."""
        return self.root / name

    def leads_out(self, name: str) -> bool:
        """Return whether the name is a symbolic link to a file outside of this folder and of the link's own folder."""
        path = self.root / name
        if not os.path.islink(path):
            return False
        return not _is_inside(path, self.real) and not _is_inside(path, os.path.realpath(path.parent))

    def names(self, folder: str) -> Iterator[str]:
        """Yield the names, relative to this folder, of the files directly in one of its subfolders, sorted.

        folder: the subfolder; "" is this folder. Broken links are yielded too, so that they are reported as faults.
        """
        try:
            with os.scandir(self.root / folder) as entries:
                files = [entry.name for entry in entries if _is_file(entry) or _is_broken_link(entry)]
        except OSError:
            return
        yield from sorted(os.path.normpath(os.path.join(folder, name)) for name in files)

    def watched(self, folders: Iterable[str]) -> list[str]:
        """Return paths whose `digest_of` changes when the content of these folders does."""
        return [str(self.root / folder) for folder in folders]


class _Listed:
    """Files by name, listed when the place is opened.

    entries: name -> the input of `_fetch`, which begins with the size and ends with a stamp.
    """

    remote = False
    watch = ""  # path whose `digest_of` changes with the content
    entries: Mapping[str, tuple] = {}

    def watched(self, folders: Iterable[str]) -> list[str]:
        return [self.watch] if self.watch else []

    def holds(self, name: str) -> bool:
        return os.path.normpath(name) in self.entries

    def source(self, name: str) -> Stored:
        size, *_, stamp = self.entries.get(os.path.normpath(name), (0, ""))
        return Stored(self, name, size, str(stamp))

    def leads_out(self, name: str) -> bool:
        return False  # symbolic links of archives are not members

    def names(self, folder: str) -> Iterator[str]:
        return (name for name in sorted(self.entries) if os.path.dirname(name) == folder)

    def read(self, name: str) -> bytes:
        """Read a file. Raises OSError, FileNotFoundError if it does not exist."""
        entry = self.entries.get(os.path.normpath(name))
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, f"image file not found in {self}", str(self))
        return self._fetch(entry)


class Archive(_Listed):
    """An archive on disk, or a folder in one.

    digest: of the archive. members: the entries of all its files.
    """

    def __init__(self, path: Path, inner: str, digest: str, members: Mapping[str, tuple]):
        start = f"{inner}/" if inner else ""
        self.path = path
        self.inner = inner
        self.digest = digest
        self.watch = str(path)
        self.entries = {}
        for name, entry in members.items():
            if name.startswith(start):
                self.entries[name.removeprefix(start)] = entry

    def __str__(self) -> str:
        return f"{self.path}/{self.inner}" if self.inner else str(self.path)


class Zip(Archive):
    """A zip. Its entries are (size, name in the archive, CRC).

    Each process that reads has a list of its own: 110 MB and a second for 118,000 members.
    """

    def _fetch(self, entry: tuple) -> bytes:
        size, name, _ = entry
        try:
            archive = _open_zip(os.getpid(), str(self.path), self.digest)
            with archive.open(name) as member:
                return member.read(size)  # `ZipFile.read` would unpack all that a wrong size hides
        except ZIP_DAMAGES as error:
            raise OSError(errno.EIO, f"damaged: {error}") from error


class Tar(Archive):
    """An uncompressed tar. Its entries are (size, offset of the content, time of modification).

    `tarfile` would read the headers of the whole archive in each process, and keep a kilobyte for each member.
    """

    def _fetch(self, entry: tuple) -> bytes:
        size, offset, _ = entry
        with open(self.path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) != size:
            raise OSError(errno.EIO, "damaged: the archive has become shorter")
        return data


@functools.lru_cache(maxsize=16)
def _open_zip(process: int, path: str, digest: str) -> zipfile.ZipFile:
    """Open a zip.

    process: part of the cache's key, since forked processes must not share a position in a file.
    digest: of the archive; likewise, since a changed one is read anew.
    """
    return zipfile.ZipFile(path)


class Storage(_Listed):
    """A folder of object storage, or of any file system that fsspec knows, by its URL."""

    remote = True

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.watch = self.url
        try:
            system, root = fsspec.core.url_to_fs(self.url)
            files = system.find(root, detail=True)
        except Exception as error:  # each file system has exceptions of its own
            raise BadInput(f"{url}: cannot be listed: {error} (data.image_dir)") from error
        if not files:
            raise BadInput(f"{url}: no files there (data.image_dir)")
        start = len(root.rstrip("/")) + 1
        self.entries = {}
        for name, info in files.items():
            size = info.get("size") or 0
            self.entries[name[start:]] = (size, name, _stamp(info))

    def __str__(self) -> str:
        return self.url

    def digest(self) -> str:
        """Return a hash of the names, sizes and stamps of all files."""
        return _hash_of((name, size, stamp) for name, (size, _, stamp) in self.entries.items())

    def _fetch(self, entry: tuple) -> bytes:
        _, name, _ = entry
        try:
            system, _ = fsspec.core.url_to_fs(self.url)  # fsspec keeps one client for each process and thread
            return system.cat_file(name)
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


class Shards(_Listed):
    """One column of the Parquet files below a folder or URL: a row group is read when one of its images is asked for.

    The name of an image is `<file>/<row group>/<row in it>`. Processes keep the row groups that they read last, so a
    sampler should ask for the images of a row group close together (`blocks_of`, `toolkit.data.sampling.EpochSampler`).
    """

    remote = False  # many threads would read one row group many times

    def __init__(self, column: str, root: str):
        self.column = column
        self.root = root

    def __str__(self) -> str:
        return f"parquet:{self.column}:{self.root}"

    def holds(self, name: str) -> bool:
        """Return True: names come from the Parquet files themselves."""
        return True

    def source(self, name: str) -> Stored:
        """Return the place of the image of this name, which is not read yet."""
        return Stored(self, name)

    def read(self, name: str) -> bytes:
        """Read the encoded image. Raises OSError if the row has no bytes or the file cannot be read."""
        file, group, row = name.rsplit("/", 2)
        try:
            images = _row_group(os.getpid(), f"{self.root}/{file}", int(group), self.column)
            data = images[int(row)].as_py()
        except OSError:
            raise
        except Exception as error:  # each file system has exceptions of its own
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
        if data is None:
            raise FileNotFoundError(errno.ENOENT, f"image file not found in {self.root}/{file}: the row has no bytes")
        return data


_storage = functools.lru_cache(maxsize=16)(Storage)  # listed once


def open_shard(url: str) -> pq.ParquetFile:
    """Open a Parquet file by its path or URL."""
    system, path = fsspec.core.url_to_fs(url)
    return pq.ParquetFile(system.open(path, "rb"))


@functools.lru_cache(maxsize=MIXED_BLOCKS)
def _row_group(process: int, url: str, group: int, column: str) -> pa.Array:
    """Return the bytes of the images of a row group.

    process: part of the cache's key, since forked processes share no open file.
    """
    with open_shard(url) as file:
        rows = file.read_row_group(group, columns=[column])
        images = rows.column(column).combine_chunks()
    if pa.types.is_struct(images.type):
        return images.field("bytes")
    return images


class ImageSources:
    """Several places, or one that is not a folder, in the order in which a file is looked for."""

    def __init__(self, parts: Sequence[Folder | Archive | Storage | Shards]):
        self.parts = tuple(parts)

    def __truediv__(self, name: str) -> Path | Stored:
        if len(self.parts) == 1:
            return self.parts[0].source(name)
        for part in self.parts:
            if part.holds(name):
                return part.source(name)
        return Stored(self, name)

    def read(self, name: str) -> bytes:
        """Raise FileNotFoundError; it is called, through `Stored`, only for a file that none of the places holds."""
        raise FileNotFoundError(errno.ENOENT, f"image file not found in any of {self}", str(self))

    def resolve(self) -> "ImageSources":
        """Return self, as `Path.resolve` returns a path, for code that accepts both."""
        return self

    def specs(self) -> list[str]:
        """Return strings from which `open_sources` opens the same places again."""
        return [str(part) for part in self.parts]

    def __str__(self) -> str:
        return ", ".join(self.specs())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageSources) and other.specs() == self.specs()

    def __hash__(self) -> int:
        return hash(tuple(self.specs()))


def open_sources(
    image_dir: str | Path | Sequence[str | Path] | ImageSources | None, must_exist: bool = True
) -> Path | ImageSources | None:
    """Open the root of images that `data.image_dir` gives; None stays None.

    image_dir: a folder; `x.zip` or `x.tar`, or a folder in such an archive (`x.zip/train2017`); a URL that fsspec knows
        (`s3://bucket/folder`); or several of these. An `ImageSources` is returned unchanged.
    must_exist: False: a single `Path` is returned without a check that it exists.

    Raises BadInput naming each place that does not exist or cannot be read.
    """
    if image_dir is None or isinstance(image_dir, ImageSources):
        return image_dir
    if not must_exist and isinstance(image_dir, Path):
        return image_dir
    given = [image_dir] if isinstance(image_dir, str | Path) else list(image_dir)
    if not given:
        raise BadInput("data.image_dir is an empty list; give a folder, or leave it out")
    parts = all_faults(*(functools.partial(_open, str(spec)) for spec in given))
    if len(parts) == 1 and isinstance(parts[0], Folder):
        return Path(given[0]).expanduser()
    return ImageSources(parts)


def parts_of(root: Path | ImageSources) -> tuple[Folder | Archive | Storage | Shards, ...]:
    """Return the places of a root, one by one."""
    return root.parts if isinstance(root, ImageSources) else (Folder(root),)


def is_there(source: Path | Stored) -> bool:
    """Return whether a file exists; `source` is `root / file_name` for a root of `open_sources`."""
    if isinstance(source, Stored):
        return not isinstance(source.container, ImageSources) and source.container.holds(source.name)
    return os.path.exists(source)  # Path's own raises for too long a name


def size_of(source: Path | Stored) -> int:
    """Return the size of a file in bytes."""
    return source.size if isinstance(source, Stored) else source.stat().st_size


def watched_of(root: Path | ImageSources, folders: Iterable[str] = ("",)) -> list[str]:
    """Return paths whose `digest_of` changes when images in these folders of the root do."""
    paths = []
    for part in parts_of(root):
        paths += part.watched(folders)
    return paths


def digest_of(path: str | Path) -> str:
    """Return a string that changes with the files of a folder, archive, file or storage; "" if it does not exist.

    That of a path with a separator at its end changes with the names of the folders in it too.
    """
    if "://" in str(path):
        return _storage(str(path)).digest()
    try:
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            return " ".join(map(str, _state_of(status)))
        with os.scandir(path) as entries:
            inside = list(entries)
        files = [(entry.name, entry.stat()) for entry in inside if _is_file(entry)]
    except OSError:
        return ""
    folders = []
    if str(path).endswith(os.sep):
        folders = [(entry.name,) for entry in inside if not _is_file(entry)]
    return _hash_of([*((name, *_state_of(status)) for name, status in files), *folders])


def _is_file(entry: os.DirEntry) -> bool:
    """Return whether this is a file, or a link to one."""
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def _is_broken_link(entry: os.DirEntry) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _state_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return the size, time of modification, and time of the last change of a file.

    The last one cannot be set back: labels that were edited to the same size by a tool that keeps the time, such as
    `rsync -t` or `touch -r`, have another one. A disk that changes a file by itself is not noticed.
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash_of(files: Iterable[tuple]) -> str:
    text = repr(sorted(files))
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def _open(spec: str) -> Folder | Archive | Storage | Shards:
    if spec.startswith("parquet:"):
        column, root = spec.removeprefix("parquet:").split(":", 1)
        return Shards(column, root)
    if "://" in spec:
        return _storage(spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        return Folder(path.resolve())
    archive = next((parent for parent in (path, *path.parents) if parent.is_file()), None)
    if archive is None:
        raise BadInput(f"{path}: no such image folder (data.image_dir)")
    digest = digest_of(archive)
    kind, members = _members(str(archive.resolve()), digest)
    inner = path.relative_to(archive).as_posix()
    opened = kind(archive.resolve(), "" if inner == "." else inner, digest, members)
    if not opened.entries:
        tops = sorted({name.split("/")[0] for name in members})[:5]
        raise BadInput(f"{path}: no such folder in the archive; at its top are {', '.join(tops) or 'no files'}")
    return opened


@functools.lru_cache(maxsize=16)
def _members(path: str, digest: str) -> tuple[type[Archive], Mapping[str, tuple]]:
    """Return the kind of an archive, and the entry of each of its files.

    digest: of the archive; part of the cache's key.
    """
    if path.lower().endswith(COMPRESSED):
        raise BadInput(f"{path}: a compressed tar can only be read from its start; make a .tar or a .zip of it")
    try:
        if zipfile.is_zipfile(path):
            return Zip, _zip_members(_open_zip(os.getpid(), path, digest))
        if tarfile.is_tarfile(path):
            return Tar, _tar_members(path)
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise BadInput(f"{path}: the archive cannot be read: {error}") from error
    raise BadInput(f"{path}: neither a folder nor an archive ({' or '.join(ARCHIVES)}; data.image_dir)")


def _zip_members(archive: zipfile.ZipFile) -> Mapping[str, tuple]:
    members: dict[str, tuple] = {}
    for info in archive.infolist():
        is_encrypted = info.flag_bits & 1
        if is_encrypted or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            way = "encrypted" if is_encrypted else f"packed by method {info.compress_type}"
            raise BadInput(f"{archive.filename}: {info.filename} is {way}; expected stored or deflated members")
        if info.filename and not info.is_dir():
            name = os.path.normpath(info.filename)
            members[name] = (info.file_size, info.filename, info.CRC)
    return members


def _tar_members(path: str) -> Mapping[str, tuple]:
    members: dict[str, tuple] = {}
    with tarfile.open(path, "r:") as archive:
        for info in archive:
            name = os.path.normpath(info.name)
            target = os.path.normpath(info.linkname)
            if info.islnk() and target in members:
                members[name] = members[target]
            elif info.isreg() and not info.issparse():
                members[name] = (info.size, info.offset_data, int(info.mtime))
            archive.members = []  # it would keep a kilobyte for each
    return members


def _stamp(info: Mapping) -> str:
    """Return the metadata of a file that change with its content."""
    keys = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
    return " ".join(str(info[key]) for key in keys if key in info)


def _is_inside(path: Path, real_root: str) -> bool:
    """Return whether a path, its symbolic links followed, is in a folder."""
    real = os.path.realpath(path)
    return real == real_root or real.startswith(real_root.rstrip(os.sep) + os.sep)
