"""What processes agree on, gather and reduce."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from processes import PRELOADED, run_on_ranks

from toolkit.base.distributed import (
    UnannouncedName,
    agree_max,
    all_reduce,
    broadcast_object,
    first_on_each_machine,
    gather_by_image,
    reduce_dict,
    run_on_main,
    state_from_main,
    world,
)
from toolkit.base.errors import BadInput

STATE = {
    "tensors": [
        torch.arange(6).view(2, 3),
        torch.zeros(0, 4),
        torch.arange(5).to(torch.bfloat16),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24.0).view(6, 4)[1::2, ::3],
    ],
    "others": (None, {"flag": torch.tensor(True), "step": torch.tensor(1.5, dtype=torch.float64)}),
}


class Foreign(ValueError):
    """Unpickling it fails: its constructor takes other arguments than it passes on."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


ERRORS = [
    BadInput(["one", "two"]),
    OSError(28, "No space left"),
    KeyboardInterrupt(),
    Foreign(1, 2),
]


def message_of(function, *args, **kwargs) -> str:
    try:
        function(*args, **kwargs)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (whatever it is, is what is tested)
        return f"{type(error).__name__}: {error}"
    return ""


def raised_on_main(error: BaseException) -> str:
    def fail():
        raise error

    return message_of(run_on_main, fail)


def everything_between_ranks() -> dict:
    rank, world_size = world()
    calls = []
    # Each rank has its names in an order of its own, and rank 0 lacks one.
    values = {"b": torch.tensor(100.0 + rank), "a": float(rank)} if rank else {"a": 0.0}
    strange = {"c": 2.0} if rank == 1 else {}
    images = [(i, {"boxes": torch.full((i % 3, 4), float(i)), "from": rank}) for i in range(rank, 7 + rank)]
    return {
        "world": (rank, world_size),
        **{op: reduce_dict(values, ["b", "a"], op=op) for op in ("mean", "sum", "max")},
        "nan": reduce_dict({"a": torch.tensor(float("nan") if rank == 1 else 1.0)}, ["a"]),
        "unannounced": message_of(reduce_dict, {"a": 1.0, **strange}, ["a"]),
        "unknown": message_of(
            reduce_dict,
            {"a": 1.0},
            ["a"],
            unknown=["x", "y"] if rank == 0 else [],
        ),
        "after": reduce_dict({"a": 1.0}, ["a"]),
        "images": gather_by_image(images),
        "main": run_on_main(lambda: calls.append(rank) or 42),
        "calls": calls,
        "state": state_from_main(lambda: STATE if rank == 0 else None),
        "agreed": agree_max(15 if rank == world_size - 1 else 2),
        "told": broadcast_object(rank),
        "vector": all_reduce(torch.tensor([1.0, rank]), "mean").tolist(),
        "errors": [raised_on_main(error) for error in ERRORS],
    }


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request) -> list[dict]:
    return run_on_ranks(everything_between_ranks, request.param)


def test_reduction_is_by_name_and_equal_on_every_rank(ranks):
    n = len(ranks)
    of_ranks = sum(range(n))
    for rank, result in enumerate(ranks):
        assert result["world"] == (rank, n)
        assert result["sum"] == {"a": of_ranks, "b": 100.0 * (n - 1) + of_ranks}
        assert result["mean"] == pytest.approx({name: total / n for name, total in result["sum"].items()})
        assert result["mean"] == ranks[0]["mean"]
        assert result["max"] == {"a": n - 1.0, "b": 99.0 + n}
        assert result["nan"] == pytest.approx({"a": float("nan")}, nan_ok=True)
        assert result["vector"] == pytest.approx([1.0, (n - 1) / 2])
        assert result["agreed"] == 15
        assert result["told"] == 0


def test_an_unannounced_name_on_one_rank_is_an_error_on_every_rank(ranks):
    for result in ranks:
        assert result["unannounced"].startswith("UnannouncedName: rank 1: value 'c' was not announced. In a script:")
        assert "rank 0: value 'x'" in result["unknown"]
        assert "rank 0: value 'y'" in result["unknown"]
        assert result["after"] == {"a": 1.0}  # the ranks are still in step


def test_predictions_are_gathered_by_image_on_the_main_process(ranks):
    first, *others = [result["images"] for result in ranks]
    assert not any(others)
    assert sorted(first) == list(range(7 + len(others)))
    for image_id, prediction in first.items():
        assert prediction["boxes"].equal(torch.full((image_id % 3, 4), float(image_id)))
        assert prediction["from"] == max(0, image_id - 6)  # the first rank that had it


def test_a_state_of_the_main_process_arrives_as_it_is(ranks):
    for result in ranks:
        torch.testing.assert_close(result["state"], STATE, rtol=0, atol=0)
        # The state of an optimizer lies in memory as its parameters do.
        assert result["state"]["tensors"][3].is_contiguous(memory_format=torch.channels_last)


def test_the_main_process_works_and_fails_for_all(ranks):
    for rank, result in enumerate(ranks):
        assert result["main"] == 42
        assert result["calls"] == ([] if rank else [0])
        bad_input, os_error, interrupt, foreign = result["errors"]
        assert bad_input == "BadInput: one\ntwo"
        assert os_error == "OSError: [Errno 28] No space left"
        assert interrupt.startswith("KeyboardInterrupt")
        assert foreign.startswith("RuntimeError" if rank else "Foreign")
        assert "1 and 2" in foreign


def test_one_process_without_torch_distributed():
    assert world() == (0, 1)
    value = torch.rand(())
    assert reduce_dict({"a": value, "b": 3}, ["b", "a", "c"]) == {"a": value.item(), "b": 3.0, "c": 0.0}
    with pytest.raises(UnannouncedName, match="rank 0: value 'z'"):
        reduce_dict({"z": 1.0}, ["a"])
    assert gather_by_image([("x.png", {"n": 1}), ("x.png", {"n": 2})]) == {"x.png": {"n": 1}}
    assert (
        agree_max(3),
        broadcast_object("y"),
        run_on_main(lambda: 5),
    ) == (3, "y", 5)
    # A view would carry the storage of the whole batch to every rank.
    kept = gather_by_image([(1, {"boxes": torch.zeros(1000, 4)[:2]})])[1]["boxes"]
    assert kept.untyped_storage().nbytes() == 32


def on_two_machines(folder: Path) -> tuple[str, str]:
    """Four ranks on two machines with a disk of their own each; ranks 2 and 3 are on the second."""
    rank, _ = world()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    disk = folder / f"disk{rank // 2}"
    begun = folder / f"begun{rank // 2}"

    def prepare():
        with open(begun, "rb") as pipe:  # the other rank of the machine would find nothing now
            pipe.read(1)
        with open(disk, "a") as file:
            file.write(str(rank))

    def fail_on_the_second():
        if rank == 2:
            raise BadInput("no space here")

    if rank % 2:
        os.write(os.open(begun, os.O_RDWR), b"x")
    first_on_each_machine(prepare)
    return disk.read_text(), message_of(first_on_each_machine, fail_on_the_second)


def test_one_process_of_each_machine_prepares(tmp_path):
    for machine in range(2):
        os.mkfifo(tmp_path / f"begun{machine}")
    results = run_on_ranks(on_two_machines, 4, tmp_path)
    assert results == [(rank, "BadInput: no space here") for rank in ("0", "0", "2", "2")]


def test_what_ranks_are_to_have_imported_exists():
    """The server that ranks are forked from silently skips modules that do not exist."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []
