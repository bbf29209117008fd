"""Trees over the objects of an image, built and traversed for all images of a batch at once (VCTree)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import send_dicts


@dataclass
class Forest:
    """Binary trees over N concatenated objects, one per image; -1 means none.

    parent: (N,) of the tree before it was made binary. left, right, up: (N,) children and parent in the binary tree.
    levels: objects of each depth, from the roots on. order: (N,) all levels in a row, inverse: its inverse.
    up_place: per level, place of each parent in the level before. left_place, right_place: per level, place of each
    child in the next level; the length of that level if there is none. num_images: up to the last with an object.
    """

    parent: Tensor
    left: Tensor
    right: Tensor
    levels: list[Tensor]
    order: Tensor
    inverse: Tensor
    up_place: list[Tensor]
    left_place: list[Tensor]
    right_place: list[Tensor]
    num_images: int


def grow_trees(scores: Tensor, num_objects: list[int]) -> Forest:
    """Grow maximum spanning trees, made binary (left: first child, right: next sibling).

    scores: (B, N_max, N_max) padded, of subject row to child column. The root has the largest mean score; then always
    the best pair of a tree node and a free object is joined. Equal scores: the earlier node of the tree, then the
    lower object. Runs on the host.
    """
    device = scores.device
    values = np.nan_to_num(scores.detach().cpu().double().numpy())  # a diverged model must not break the walk
    num_images, size = values.shape[:2]
    counts = np.asarray(num_objects)
    local = {key: np.full((num_images, size), -1) for key in ("parent", "left", "right", "up")}
    depth = np.zeros((num_images, size), np.int64)
    _grow(values, counts, local, depth)
    real = np.arange(size) < counts[:, None]
    start = (np.cumsum(counts) - counts)[:, None]
    flat = {key: np.where(value >= 0, value + start, -1)[real] for key, value in local.items()}
    return _schedule(
        flat,
        depth[real],
        int(np.append(0, np.flatnonzero(counts) + 1)[-1]),
        device,
    )


def _grow(scores: np.ndarray, counts: np.ndarray, local: dict[str, np.ndarray], depth: np.ndarray) -> None:
    num_images, size = scores.shape[:2]
    images = np.arange(num_images)
    real = np.arange(size) < counts[:, None]
    means = np.where(real[:, None], scores, 0).sum(2) / np.maximum(counts, 1)[:, None]
    node = np.where(real, means, -np.inf).argmax(1) if size else images
    best = np.full((num_images, size), -np.inf)
    via = np.zeros((num_images, size), np.int64)
    via_step = np.zeros((num_images, size), np.int64)
    youngest = np.full((num_images, size), -1)  # the child that was added last
    free = real.copy()
    for step in range(size):
        alive = images[step < counts]
        child = node[alive]
        if step:
            _attach(alive, child, via[alive, child], local, youngest, depth)
        free[alive, child] = False
        better = free[alive] & (scores[alive, child] > best[alive])
        best[alive] = np.where(better, scores[alive, child], best[alive])
        via[alive] = np.where(better, child[:, None], via[alive])
        via_step[alive] = np.where(better, step, via_step[alive])
        open_best = np.where(free, best, -np.inf)
        ties = free & (open_best == open_best.max(1, keepdims=True))
        node = np.where(ties, via_step * size + np.arange(size), size**2).argmin(1)


def _attach(image, child, parent, local: dict[str, np.ndarray], youngest: np.ndarray, depth: np.ndarray) -> None:
    """Make `child` the next child of `parent`: in the binary tree the left child, or right of its previous sibling."""
    sibling = youngest[image, parent]
    eldest = sibling < 0
    up = np.where(eldest, parent, sibling)
    local["parent"][image, child] = parent
    local["up"][image, child] = up
    local["left"][image[eldest], parent[eldest]] = child[eldest]
    local["right"][image[~eldest], sibling[~eldest]] = child[~eldest]
    youngest[image, parent] = child
    depth[image, child] = depth[image, up] + 1


def _schedule(flat: dict[str, np.ndarray], depth: np.ndarray, num_images: int, device: torch.device) -> Forest:
    order = np.argsort(depth, kind="stable")
    levels = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(order) else []
    position = np.zeros(len(depth), np.int64)
    for level in levels:
        position[level] = np.arange(len(level))

    def child_places(key: str) -> list[np.ndarray]:
        below = [*map(len, levels[1:]), 0][: len(levels)]
        return [np.where(flat[key][lv] >= 0, position[flat[key][lv]], n) for lv, n in zip(levels, below, strict=True)]

    inverse = np.argsort(order)
    single = {key: flat[key] for key in ("parent", "left", "right")} | {"order": order, "inverse": inverse}
    of_levels = {
        "levels": levels,
        "up_place": [position[flat["up"][level]] for level in levels],
    }
    of_levels |= {"left_place": child_places("left"), "right_place": child_places("right")}
    every = [*single.values(), *(array for several in of_levels.values() for array in several)]
    (sent,) = send_dicts(
        [{str(i): torch.from_numpy(array) for i, array in enumerate(every)}],
        device,
    )  # in one copy
    moved = iter(sent.values())
    of_nodes = {name: next(moved) for name in single}
    return Forest(
        **of_nodes,
        **{n: [next(moved) for _ in levels] for n in of_levels},
        num_images=num_images,
    )


def _orthogonal_gates(layer: nn.Linear, dim: int, forget: slice = slice(0), bias: float = 0.0) -> nn.Linear:
    """Draw the weight of each gate orthogonal; set biases to 0 and those of the forget gates to `bias`."""
    with torch.no_grad():
        for gate in layer.weight.split(dim):
            nn.init.orthogonal_(gate)
        layer.bias.zero_()
        layer.bias[forget] = bias
    return layer


class UpwardLSTM(nn.Module):
    """An LSTM from the leaves to the roots: each object sees its two children. Every cell has a highway connection."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.dim = dim
        self.direct = _orthogonal_gates(nn.Linear(in_dim, dim), dim)
        self.input = _orthogonal_gates(nn.Linear(in_dim, 6 * dim), dim)
        gates = slice(2 * dim, 4 * dim)
        self.left = _orthogonal_gates(nn.Linear(dim, 6 * dim), dim, gates, 0.5)
        self.right = _orthogonal_gates(nn.Linear(dim, 6 * dim), dim, gates, 0.5)

    def forward(self, features: Tensor, forest: Forest) -> Tensor:
        """Encode (N, in_dim) -> (N, dim)."""
        direct = self.direct(features)
        projected = self.input(features)
        state = memory = direct.new_zeros(1, self.dim)  # the last row stands for a missing child
        outputs = []
        steps = list(zip(forest.levels, forest.left_place, forest.right_place, strict=True))
        for level, left, right in reversed(steps):
            sums = projected[level] + self.left(state[left]) + self.right(state[right])
            into, out, forget_left, forget_right, new, highway = sums.chunk(6, 1)
            level_memory = into.sigmoid() * new.tanh()
            level_memory = level_memory + forget_left.sigmoid() * memory[left] + forget_right.sigmoid() * memory[right]
            highway = highway.sigmoid()
            level_state = highway * out.sigmoid() * level_memory.tanh() + (1 - highway) * direct[level]
            outputs.append(level_state)
            state = F.pad(level_state, (0, 0, 0, 1))
            memory = F.pad(level_memory, (0, 0, 0, 1))
        return torch.cat(outputs[::-1])[forest.inverse]


class DownwardLSTM(nn.Module):
    """An LSTM from the roots to the leaves: each object sees its parent. Every cell has a highway connection."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.dim = dim
        self.direct = _orthogonal_gates(nn.Linear(in_dim, dim), dim)
        self.input = _orthogonal_gates(nn.Linear(in_dim, 5 * dim), dim)
        self.state = _orthogonal_gates(
            nn.Linear(dim, 5 * dim),
            dim,
            slice(2 * dim, 3 * dim),
            1.0,
        )

    def cell(self, direct: Tensor, projected: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        into, out, forget, new, highway = (projected + self.state(state)).chunk(5, 1)
        memory = into.sigmoid() * new.tanh() + forget.sigmoid() * memory
        highway = highway.sigmoid()
        return highway * out.sigmoid() * memory.tanh() + (1 - highway) * direct, memory

    def forward(self, features: Tensor, forest: Forest) -> Tensor:
        """Encode (N, in_dim) -> (N, dim)."""
        direct = self.direct(features)
        projected = self.input(features)
        outputs = []
        state = direct.new_zeros(len(features), self.dim)
        memory = state
        for depth, (level, up) in enumerate(zip(forest.levels, forest.up_place, strict=True)):
            if depth == 0:
                up = torch.arange(len(level), device=level.device)  # zeros
            state, memory = self.cell(
                direct[level],
                projected[level],
                state[up],
                memory[up],
            )
            outputs.append(state)
        return torch.cat(outputs)[forest.inverse]


class TreeLSTM(nn.Module):
    """Upward and downward LSTM side by side: (N, in_dim) -> (N, dim)."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.up = UpwardLSTM(in_dim, dim // 2)
        self.down = DownwardLSTM(in_dim, dim // 2)

    def forward(self, features: Tensor, forest: Forest) -> Tensor:
        return torch.cat([self.up(features, forest), self.down(features, forest)], 1)
