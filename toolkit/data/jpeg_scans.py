"""Whether the compressed pixels of a JPEG are all there.

libjpeg accepts a file that was cut if an end marker follows, and fills what is missing with grey, with a warning that
its callers do not pass on.
"""

import io
import re
import struct
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

BASELINE = (0xC0, 0xC1)  # frame headers of files whose blocks are coded at once,
PROGRESSIVE = 0xC2  # and of those that refine them scan by scan
SCAN = 0xDA
END_MARKERS = (0xD8, 0xD9)
NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # in the pixels FF is followed by 00, or restarts them
COEFFICIENTS = 64  # of a block
NOT_CODED = 16  # more bits than a coefficient has
GREY = 128.0  # of a block that is missing
TOLERANCE = 2.0  # of grey values, by the rounding of colours
PIXELS = bytes(range(1, 255))  # any bytes but FF
MORE = PIXELS + b"".join(bytes([0xFF, restart]) + PIXELS for restart in range(0xD0, 0xD8))
CMYK_COMPONENTS = 4  # whose missing blocks become a colour that depends on the file

Segments = Sequence[tuple[int, int]]  # (marker, position) up to the first scan


def is_cut(data: bytearray, segments: Segments, pixels: Tensor, block: int = 8, thorough: bool = False) -> bool:
    """Return whether pixels of a JPEG are missing that libjpeg has decoded without an error.

    Costs next to nothing unless the last block is grey, as a missing one would be: then the file is decoded twice.

    Args:
        data: the file. segments: its segments up to the first scan.
        pixels: (3, H, W) uint8, as decoded, whatever the orientation.
        block: side of a block in these pixels.
        thorough: decode a progressive file twice, too; else only whole scans that are missing are noticed in it.
    """
    frames = [marker for marker, _ in segments if marker in (*BASELINE, PROGRESSIVE)]
    if not frames or segments[-1][0] != SCAN:
        return False
    try:
        components = len(_components(data, segments))
        in_first_scan = data[segments[-1][1] + 4]
        is_progressive = frames[0] == PROGRESSIVE
        is_suspicious = components == CMYK_COMPONENTS or thorough and is_progressive or _may_be_grey(pixels, block)
        if not (is_suspicious or is_progressive or in_first_scan < components):
            return False
        lacks_scans, end = _read_scans(data, segments)
    except (struct.error, LookupError, ValueError):  # an uncommon file, which was decoded all the same
        return False
    return lacks_scans or is_suspicious and _takes_more(data, end)


def _components(data: bytearray, segments: Segments) -> list[int]:
    """Return the ids of the colour components in the frame header."""
    at = next(at for marker, at in segments if marker in (*BASELINE, PROGRESSIVE))
    return [data[at + 10 + 3 * number] for number in range(data[at + 9])]


def _read_scans(data: bytearray, segments: Segments) -> tuple[bool, int]:
    """Return whether the scans leave bits of a coefficient out, and the position of the marker behind the last scan.

    Raises struct.error, IndexError or ValueError for a file whose segments end behind it.
    """
    left = {component: np.full(COEFFICIENTS, NOT_CODED) for component in _components(data, segments)}
    _, at = segments[-1]
    end = len(data)
    while data[at + 1] not in END_MARKERS:
        marker = data[at + 1]
        (length,) = struct.unpack_from(">H", data, at + 2)
        found = NEXT_MARKER.search(data, at + 2 + length)
        following = found.start() if found else len(data)
        if marker == SCAN:
            _note_scan(data, at, left)
            end = following
        if found is None:
            break
        at = following
    return any(bits.any() for bits in left.values()), end


def _note_scan(data: bytearray, at: int, left: dict[int, np.ndarray]) -> None:
    """Set in `left` how many bits of the coefficients of each component are left after the scan at this position."""
    count = data[at + 4]
    first, last, bits = data[at + 5 + 2 * count : at + 8 + 2 * count]
    for number in range(count):
        of_component = left.get(data[at + 5 + 2 * number])
        if of_component is not None:
            of_component[first : last + 1] = bits & 15


def _may_be_grey(pixels: Tensor, block: int) -> bool:
    """Return whether what is seen of the block in one corner has the luma of a missing block.

    The last block is in the lower right corner, or in any other one after a rotation.
    """
    _, height, width = pixels.shape
    pixels = pixels.numpy()
    corners = pixels[:, :: max(1, height - 1), :: max(1, width - 1)]
    if not any(map(_is_grey, *corners.reshape(3, -1).tolist())):  # nearly every picture
        return False
    rows = (height - 1) % block + 1
    columns = (width - 1) % block + 1
    for of_rows in (pixels[:, :rows], pixels[:, height - rows :]):
        for corner in (of_rows[:, :, :columns], of_rows[:, :, width - columns :]):
            if all(map(_is_grey, *corner.reshape(3, -1).tolist())):
                return True
    return False


def _is_grey(red: int, green: int, blue: int) -> bool:
    """Return whether a pixel has the luma of a missing block."""
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return abs(luma - GREY) <= TOLERANCE


def _takes_more(data: bytearray, end: int) -> bool:
    """Return whether further bytes at the end of the last scan change the pixels: a whole scan needs none."""
    pixels = _decoded(data)
    if pixels is None:
        return False
    with_more = _decoded(data[:end] + MORE + data[end:])
    return with_more is None or not np.array_equal(pixels, with_more)


def _decoded(data: bytearray) -> np.ndarray | None:
    """Decode by Pillow, which does not print libjpeg's warnings; return None if it cannot."""
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            return np.asarray(image)
    except (OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, ArithmeticError, struct.error):
        return None
