"""Image files to RGB tensors: upright, 8 bits, whole, or an error that says why not."""

import io
import struct
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torchvision.io import ImageReadMode, decode_jpeg

JPEG_START = b"\xff\xd8\xff"
EXTENSIONS = {
    "JPEG": {".jpg", ".jpeg", ".jpe", ".jfif"},
    "MPO": {".jpg", ".jpeg", ".mpo"},  # two JPEGs in one file, as some cameras write; the first is read
    "PNG": {".png"},
    "BMP": {".bmp", ".dib"},
    "GIF": {".gif"},
    "TIFF": {".tif", ".tiff"},
    "WEBP": {".webp"},
    "PPM": {".ppm", ".pgm", ".pbm", ".pnm"},
}
# What Pillow's readers let out of broken files; OSError, which tells more of the cause, apart.
BROKEN = (SyntaxError, ValueError, TypeError, EOFError, LookupError, ArithmeticError, struct.error,
          Image.DecompressionBombError)  # fmt: skip
IMAGE_SUFFIXES = frozenset().union(*EXTENSIONS.values())


class ImageError(Exception):
    """An image that cannot be decoded. `reason`: in words; `path`: the file, None for bytes."""

    def __init__(self, reason: str, path: Path | None = None):
        self.reason, self.path = reason, path
        super().__init__(reason if path is None else f"{path}: {reason}")


class ImageProbe(NamedTuple):
    """size_hw: of the upright image in pixels; notes: what decoding will change; format: as Pillow names it."""

    size_hw: tuple[int, int]
    notes: tuple[str, ...]
    format: str


def decode_image(source: Path | str | bytes) -> torch.Tensor:
    """An image file, or its bytes, as uint8 (3, H, W) RGB, EXIF orientation applied.

    Strides are those of (H, W, 3) memory, which both decoders give and torchvision resizes fastest.

    JPEG (grey and CMYK too) goes through torchvision, the rest through Pillow. 16-bit grey is scaled (65535 -> 255),
    not clipped; alpha is dropped, the colour under it kept. Raises ImageError for a file that is missing, empty, no
    image, or not whole: a truncated image is never filled up with grey.
    """
    path, data = _read(source)
    if data[:3] == JPEG_START:
        try:
            # torchvision refuses truncated data, and rotates by EXIF only when told to
            return decode_jpeg(
                torch.frombuffer(data, dtype=torch.uint8), ImageReadMode.RGB, apply_exif_orientation=True
            )
        except RuntimeError as error:
            if "truncated" in str(error):
                raise ImageError("image data truncated", path) from error
            # an uncommon kind of JPEG, or damage: Pillow decodes it or says what is wrong
    return _decode_with_pillow(data, path)


def probe_image(source: Path | str | bytes) -> ImageProbe:
    """Size, format and notes from the header alone. Raises ImageError as `decode_image` does, truncation excepted."""
    path = None if isinstance(source, bytes) else Path(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(source) if path is None else path) as image:
                orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
                width, height = image.size
                return ImageProbe((width, height) if orientation in (5, 6, 7, 8) else (height, width),
                                  _notes(image), image.format)
    except UnidentifiedImageError as error:
        _, data = _read(source)  # says "empty" where that is the reason
        raise ImageError(_no_image(data), path) from error
    except OSError as error:
        raise ImageError(_os_error(error), path) from error
    except BROKEN as error:
        raise ImageError(f"image cannot be read: {error}", path) from error


def _read(source: Path | str | bytes) -> tuple[Path | None, bytearray]:
    if isinstance(source, bytes):
        path, data = None, bytearray(source)
    else:
        path = Path(source)
        try:
            data = bytearray(path.stat().st_size)
            with open(path, "rb", buffering=0) as file:
                file.readinto(data)
        except OSError as error:
            raise ImageError(_os_error(error), path) from error
    if not data:
        raise ImageError("empty image file (0 bytes)", path)
    return path, data


def _decode_with_pillow(data: bytearray, path: Path | None) -> torch.Tensor:
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            if image.format == "PNG" and b"IEND" not in data:  # Pillow is content once it has every pixel
                raise ImageError("image data truncated", path)
            pixels = _to_rgb(ImageOps.exif_transpose(image), path)
    except UnidentifiedImageError as error:
        raise ImageError(_no_image(data), path) from error
    except (OSError, *BROKEN) as error:
        # Pillow's words for a short file, in its formats: "image file is truncated", "unrecognized data stream" ...
        reason = "image data truncated" if "truncated" in str(error) else f"image data broken: {error}"
        raise ImageError(reason, path) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _to_rgb(image: Image.Image, path: Path | None) -> np.ndarray:
    """(H, W, 3) uint8."""
    if image.mode.startswith("I"):  # "I;16", "I;16B", or "I" holding 16 bits
        grey = np.asarray(image).astype(np.int64)
        if grey.size and not 0 <= grey.min() <= grey.max() <= 65535:
            raise ImageError(f"grey values from {grey.min()} to {grey.max()}; expected 8 or 16 bits", path)
        return np.repeat(((grey + 128) // 257).astype(np.uint8)[..., None], 3, axis=2)
    if image.mode == "F":
        raise ImageError("floating-point pixels; expected 8 or 16 bits", path)
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def _notes(image: Image.Image) -> tuple[str, ...]:
    notes = []
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        notes.append("alpha channel dropped, the colours under it kept")
    if image.mode.startswith("I"):
        notes.append("16-bit grey scaled to 8 bits")
    if image.mode == "CMYK":
        notes.append("CMYK converted to RGB")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        notes.append(f"first of {image.n_frames} frames used")
    return tuple(notes)


def _no_image(data: bytes | bytearray) -> str:
    return f"not an image: it begins with {bytes(data[:12])!r}"


def _os_error(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "image file not found"
    return f"image file cannot be read: {error.strerror or error}"
