"""Trees over the objects of an image, built and traversed for all images of a batch at once (VCTree)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import send_dicts


@dataclass
class Forest:
    """Binary trees over N concatenated objects, one for each image. In the first three fields, -1 means none.

    parent: (N,) in the tree before it was made binary. left, right: (N,) children in the binary tree. levels: objects
    of each depth, beginning with the roots. order: (N,) the levels joined; inverse: its inverse permutation.
    up_place: for each level, the place of each object's parent in the level before. left_place, right_place: for each
    level, the place of each object's child in the next level, or the length of the next level if the object has none.
    num_images: number of images up to the last one with an object.
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
    """Grow a maximum spanning tree over the objects of each image, and make it binary (left: first child, right: next
    sibling). It runs on the host.

    The root is the object with the largest mean score. In each further step, the best pair of an object in the tree and
    one outside is joined. Of equal scores, that with the object that was added to the tree earlier counts, then that
    with the lower object.

    scores: (B, N_max, N_max), padded, from parent (row) to child (column). num_objects: number of objects of each
    image.
    """
    device = scores.device
    values = scores.detach().cpu().double().numpy()
    values = np.nan_to_num(values)  # a diverged model must not break the walk
    num_images, size = values.shape[:2]
    counts = np.asarray(num_objects)
    local = {key: np.full((num_images, size), -1) for key in ("parent", "left", "right", "up")}
    depth = np.zeros((num_images, size), np.int64)
    _grow(values, counts, local, depth)
    real = np.arange(size) < counts[:, None]
    start = (np.cumsum(counts) - counts)[:, None]
    flat = {}
    for key, numbers in local.items():  # from numbers in the image to rows of all objects
        rows = np.where(numbers >= 0, numbers + start, -1)
        flat[key] = rows[real]
    with_objects = np.flatnonzero(counts)
    last_image = int(with_objects[-1]) + 1 if len(with_objects) else 0
    return _schedule(flat, depth[real], last_image, device)


def _grow(scores: np.ndarray, counts: np.ndarray, local: dict[str, np.ndarray], depth: np.ndarray) -> None:
    """Run Prim's algorithm on all images at once, one object of each per step; `local` and `depth` (B, N_max) are
    filled."""
    num_images, size = scores.shape[:2]
    images = np.arange(num_images)
    real = np.arange(size) < counts[:, None]
    means = np.where(real[:, None], scores, 0).sum(2) / np.maximum(counts, 1)[:, None]
    node = np.where(real, means, -np.inf).argmax(1) if size else images
    # Of each free object: its best score with a node of the tree, that node, and the step at which it was added.
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
        from_child = scores[alive, child]
        better = free[alive] & (from_child > best[alive])
        best[alive] = np.where(better, from_child, best[alive])
        via[alive] = np.where(better, child[:, None], via[alive])
        via_step[alive] = np.where(better, step, via_step[alive])
        open_best = np.where(free, best, -np.inf)
        ties = free & (open_best == open_best.max(1, keepdims=True))
        precedence = via_step * size + np.arange(size)  # the earlier node first, then the lower object
        node = np.where(ties, precedence, size**2).argmin(1)


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
    levels = []
    if len(order):
        cuts = np.flatnonzero(np.diff(depth[order])) + 1
        levels = np.split(order, cuts)
    position = np.zeros(len(depth), np.int64)  # of each object in its level
    for level in levels:
        position[level] = np.arange(len(level))

    def child_places(key: str) -> list[np.ndarray]:
        places = []
        for i, level in enumerate(levels):
            next_length = len(levels[i + 1]) if i + 1 < len(levels) else 0
            children = flat[key][level]
            places.append(np.where(children >= 0, position[children], next_length))
        return places

    of_nodes = {
        "parent": flat["parent"],
        "left": flat["left"],
        "right": flat["right"],
        "order": order,
        "inverse": np.argsort(order),
    }
    of_levels = {
        "levels": levels,
        "up_place": [position[flat["up"][level]] for level in levels],
        "left_place": child_places("left"),
        "right_place": child_places("right"),
    }
    # All arrays go in one copy.
    arrays = dict(of_nodes)
    for name, several in of_levels.items():
        for i, array in enumerate(several):
            arrays[f"{name}_{i}"] = array
    (sent,) = send_dicts([{name: torch.from_numpy(array) for name, array in arrays.items()}], device)
    return Forest(
        **{name: sent[name] for name in of_nodes},
        **{name: [sent[f"{name}_{i}"] for i in range(len(levels))] for name in of_levels},
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
    """An LSTM that runs from the leaves to the roots, so that each object gets the states of its two children. Every
    cell has a highway connection."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.dim = dim
        self.direct = _orthogonal_gates(nn.Linear(in_dim, dim), dim)
        self.input = _orthogonal_gates(nn.Linear(in_dim, 6 * dim), dim)
        gates = slice(2 * dim, 4 * dim)
        self.left = _orthogonal_gates(nn.Linear(dim, 6 * dim), dim, gates, 0.5)
        self.right = _orthogonal_gates(nn.Linear(dim, 6 * dim), dim, gates, 0.5)

    def forward(self, features: Tensor, forest: Forest) -> Tensor:
        """Encode the features (N, in_dim) of the objects to (N, dim)."""
        direct = self.direct(features)
        projected = self.input(features)
        state = memory = direct.new_zeros(1, self.dim)  # the last row stands for a missing child
        outputs = []
        steps = list(zip(forest.levels, forest.left_place, forest.right_place, strict=True))
        for level, left, right in reversed(steps):
            sums = projected[level] + self.left(state[left]) + self.right(state[right])
            into, out, forget_left, forget_right, new, highway = sums.chunk(6, 1)
            level_memory = into.sigmoid() * new.tanh()
            level_memory = level_memory + forget_left.sigmoid() * memory[left]
            level_memory = level_memory + forget_right.sigmoid() * memory[right]
            highway = highway.sigmoid()
            level_state = highway * out.sigmoid() * level_memory.tanh()
            level_state = level_state + (1 - highway) * direct[level]
            outputs.append(level_state)
            state = F.pad(level_state, (0, 0, 0, 1))
            memory = F.pad(level_memory, (0, 0, 0, 1))
        return torch.cat(outputs[::-1])[forest.inverse]


class DownwardLSTM(nn.Module):
    """An LSTM that runs from the roots to the leaves, so that each object gets the state of its parent. Every cell has
    a highway connection."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.dim = dim
        self.direct = _orthogonal_gates(nn.Linear(in_dim, dim), dim)
        self.input = _orthogonal_gates(nn.Linear(in_dim, 5 * dim), dim)
        forget = slice(2 * dim, 3 * dim)
        self.state = _orthogonal_gates(nn.Linear(dim, 5 * dim), dim, forget, 1.0)

    def cell(self, direct: Tensor, projected: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one level of n objects; return their states and memories, (n, dim) each.

        Args:
            direct: (n, dim) features of the highway connection.
            projected: (n, 5 dim) projected features.
            state, memory: (n, dim) of the parents; 0 for roots.
        """
        sums = projected + self.state(state)
        into, out, forget, new, highway = sums.chunk(5, 1)
        memory = into.sigmoid() * new.tanh() + forget.sigmoid() * memory
        highway = highway.sigmoid()
        state = highway * out.sigmoid() * memory.tanh() + (1 - highway) * direct
        return state, memory

    def forward(self, features: Tensor, forest: Forest) -> Tensor:
        """Encode the features (N, in_dim) of the objects to (N, dim)."""
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
    """An upward and a downward LSTM whose results are concatenated, from (N, in_dim) to (N, dim)."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.up = UpwardLSTM(in_dim, dim // 2)
        self.down = DownwardLSTM(in_dim, dim // 2)

    def forward(self, features: Tensor, forest: Forest) -> Tensor:
        upward = self.up(features, forest)
        downward = self.down(features, forest)
        return torch.cat([upward, downward], 1)
