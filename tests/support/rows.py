"""Tables of numbers as text, which reads more easily than nested lists."""

import torch


def rows(text: str) -> list[list[float]]:
    """`"0 1 2, 3 4 5"` are two rows of three numbers; "" has none."""
    return [[float(number) for number in row.split()] for row in text.split(",") if row.strip()]


def boxes(text: str) -> torch.Tensor:
    """Boxes (N, 4), `"0 0 20 20, 5 5 9 9"`."""
    return torch.tensor(rows(text)).reshape(-1, 4)


def integers(text: str, width: int = 1) -> torch.Tensor:
    """Rows (N, width) int64; (N,) for a width of 1: `"0, 1, 2"`."""
    table = torch.tensor(rows(text)).reshape(-1, width).long()
    return table[:, 0] if width == 1 else table
