"""What processes agree on, gather and reduce."""

import importlib.util
import json
import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import PRELOADED, as_launched, run_on_ranks
from torch import nn

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
from toolkit.base.seeding import seed_step
from toolkit.run.processes import RESTARTABLE
from toolkit.step.losses import window_denominators

STATE = {
    "tensors": [
        torch.arange(6).view(2, 3),
        torch.zeros(0, 4),
        torch.rand(5).to(torch.bfloat16),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(6, 4)[1::2, ::3],
    ],
    "others": ("text", None, {"flag": torch.tensor(True), "step": torch.tensor(1.5, dtype=torch.float64)}),
}


def message_of(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (whatever it is, is what is tested)
        return f"{type(error).__name__}: {error}"


def everything_between_ranks():
    rank, world_size = world()
    calls = []

    def only_main():
        calls.append(rank)
        return {"answer": 42}

    counts = [{"boxes": 3 * rank, "class_weight": 0.5 + rank}, {"boxes": 0, "class_weight": 0}]
    # each rank reports its keys in an order of its own, and rank 0 lacks one
    values = {"b": torch.tensor(100.0 + rank), "a": float(rank)} if rank else {"a": 0.0}
    result = {
        "world": (rank, world_size),
        "mean": reduce_dict(values, ["b", "a"]),
        "sum": reduce_dict(dict(reversed(values.items())), ["a", "b"], op="sum"),
        "max": reduce_dict(values, ["a", "b"], op="max"),
        "nan": reduce_dict({"a": torch.tensor(float("nan") if rank == 1 else 1.0)}, ["a"]),
        "unannounced": message_of(reduce_dict, {"a": 1.0, **({"c": 2.0} if rank == 1 else {})}, ["a"]),
        "unknown": message_of(reduce_dict, {"a": 1.0}, ["a"], unknown=["x", "y"] if rank == 0 else []),
        "after": reduce_dict({"a": 1.0}, ["a"]),
        "images": gather_by_image(
            (i, {"boxes": torch.full((i % 3, 4), float(i)), "from": rank}) for i in range(rank, 7 + rank)
        ),
        "main": run_on_main(only_main),
        "state": state_from_main(lambda: STATE if rank == 0 else None),
        "calls": calls,
        "agreed": agree_max(15 if rank == world_size - 1 else 2),
        "told": broadcast_object({"rank": rank}),
        "denominators": [window_denominators(counts, "cpu", mode, ("boxes",)) for mode in ("global", "original")],
        "vector": all_reduce(torch.tensor([1.0, rank]), "mean").tolist(),
    }
    for name, error in {
        "bad": BadInput(["one", "two"]),
        "os": OSError(28, "No space left"),
        "interrupt": KeyboardInterrupt(),
        "foreign": Foreign(1, 2),
    }.items():

        def fail(error=error):
            raise error

        result[name] = message_of(run_on_main, fail)
    return result


class Foreign(ValueError):
    """Unpickling it fails: its constructor takes other arguments than it passes on."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    return run_on_ranks(everything_between_ranks, request.param)


def test_reduction_is_by_name_and_equal_on_every_rank(ranks):
    n = len(ranks)
    total = {"a": float(sum(range(n))), "b": 100.0 * (n - 1) + sum(range(n))}
    for result in ranks:
        assert result["sum"] == total
        assert result["mean"] == pytest.approx({k: v / n for k, v in total.items()})
        assert result["mean"] == ranks[0]["mean"] and list(result["mean"]) == ["a", "b"]
        assert result["max"] == {"a": n - 1.0, "b": 99.0 + n}
        assert np.isnan(result["nan"]["a"])


def test_an_unannounced_key_on_one_rank_is_an_error_on_every_rank_that_names_it(ranks):
    for result in ranks:
        assert result["unannounced"].startswith("UnannouncedName: rank 1: value 'c' was not announced. In a script:")
        assert "rank 0: value 'x'" in result["unknown"] and "rank 0: value 'y'" in result["unknown"]
        assert result["after"] == {"a": 1.0}  # and the ranks are still in step


def test_predictions_are_gathered_by_image_once_and_unmixed(ranks):
    assert not any(result["images"] for result in ranks[1:]), "the main process alone looks at them"
    images = ranks[0]["images"]
    assert sorted(images) == list(range(7 + len(ranks) - 1))
    for image_id, prediction in images.items():
        assert torch.equal(prediction["boxes"], torch.full((image_id % 3, 4), float(image_id)))
        assert prediction["from"] == max(0, image_id - 6)  # the first rank that had it


def test_a_state_of_the_main_process_arrives_as_it_is(ranks):
    for result in ranks:
        flat, wanted = (torch.utils._pytree.tree_flatten(state) for state in (result["state"], ranks[0]["state"]))
        assert flat[1] == wanted[1] and len(flat[0]) == 9
        for own, theirs in zip(flat[0], wanted[0], strict=True):
            same = isinstance(own, torch.Tensor) and own.dtype == theirs.dtype and torch.equal(own, theirs)
            assert same or own == theirs
        in_order = result["state"]["tensors"][3].is_contiguous(memory_format=torch.channels_last)
        assert in_order, "an optimizer's state lies in memory as its parameters do"


def test_main_works_for_all(ranks):
    for rank, result in enumerate(ranks):
        assert result["main"] == {"answer": 42} and result["calls"] == ([0] if rank == 0 else [])
        assert result["bad"] == "BadInput: one\ntwo"
        assert result["os"] == "OSError: [Errno 28] No space left"
        assert result["interrupt"].startswith("KeyboardInterrupt")
        assert result["agreed"] == 15 and result["told"] == {"rank": 0}
        assert result["vector"] == pytest.approx([1.0, (len(ranks) - 1) / 2])
        assert "1 and 2" in result["foreign"] and result["foreign"].startswith("RuntimeError" if rank else "Foreign")


def test_denominators_make_the_gradients_that_ddp_averages_those_of_the_big_batch(ranks):
    """The equality itself, with the scripts: tests/scripts/test_equality.py."""
    n = len(ranks)
    boxes = 3 * sum(range(n)) / n
    for rank, result in enumerate(ranks):
        whole, original = ([{name: value.item() for name, value in micro.items()} for micro in window]
                           for window in result["denominators"])  # fmt: skip
        assert whole == [{"boxes": boxes, "class_weight": pytest.approx(0.5 + sum(range(n)) / n)}] * 2
        # times 2: the window is the mean of its two micro-batches; what counts nothing divides by 1
        first = {"boxes": 2 * boxes, "class_weight": 2 * (0.5 + rank)}
        assert original == [first, {"boxes": 2.0, "class_weight": 2.0}]


def test_one_process_without_torch_distributed():
    assert world() == (0, 1)
    assert reduce_dict({"a": torch.tensor(2.0), "b": 3}, ["b", "a", "c"], op="sum") == {"a": 2.0, "b": 3.0, "c": 0.0}
    with pytest.raises(UnannouncedName, match="rank 0: value 'z'"):
        reduce_dict({"z": 1.0}, ["a"])
    assert gather_by_image([("x.png", {"n": 1}), ("x.png", {"n": 2})]) == {"x.png": {"n": 1}}
    assert (agree_max(3), broadcast_object("y"), run_on_main(lambda: 5)) == (3, "y", 5)
    value, batch = torch.rand(()), torch.zeros(1000, 4)
    assert reduce_dict({"a": value}, ["a"])["a"] == value.item()  # float32 is kept exactly
    # a view would carry the storage of the whole batch to every rank
    assert gather_by_image([(1, {"boxes": batch[:2]})])[1]["boxes"].untyped_storage().nbytes() == 32


def draws():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def test_random_numbers_are_a_function_of_seed_step_rank_and_micro_batch():
    seen = {}
    for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (2**40, 10**7, 63, 5)]:
        seed_step(*key)
        seen[key] = draws()
    assert len({str(numbers) for numbers in seen.values()}) == len(seen)
    for key, numbers in reversed(seen.items()):
        seed_step(*key)
        assert draws() == numbers


def on_two_machines(folder):
    """Four ranks on two machines with a disk of their own each; ranks 2 and 3 are on the second."""
    rank, _ = world()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    disk, begun = (Path(folder) / f"{name}{rank // 2}" for name in ("disk", "begun"))

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
    results = run_on_ranks(on_two_machines, 4, str(tmp_path))
    assert results == [(rank, "BadInput: no space here") for rank in ("0", "0", "2", "2")]
    calls = []
    first_on_each_machine(lambda: calls.append(1))
    assert calls == [1]


class Tiny(nn.Module):
    def __init__(self, leaves_unused: bool, buffers_steer_training: bool):
        super().__init__()
        self.leaves_unused, self.buffers_steer_training = leaves_unused, buffers_steer_training
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("own", torch.tensor(float(world()[0])))

    def forward(self, x):
        return self.second(self.first(x)).sum() + self.own


def as_prepared() -> list:
    """For each kind of detector: whether DDP looks for unused parameters, whether gradients share a bucket, and the
    buffer of this rank behind a step."""
    from toolkit.run.processes import prepare

    found, accelerator = [], as_launched()
    warnings.simplefilter("error", FutureWarning)  # every process would print it
    for leaves_unused in (True, False):
        detector = Tiny(leaves_unused, buffers_steer_training=leaves_unused)
        model, _ = prepare(accelerator, detector, torch.optim.SGD(detector.parameters(), 0.1), None, True)
        model(torch.ones(1, 2)).backward()
        model(torch.ones(1, 2)).backward()
        storages = {p.grad.untyped_storage().data_ptr() for p in detector.parameters()}
        found.append((model.find_unused_parameters, len(storages) == 1, detector.own.item()))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_look_for_unused_parameters_only_where_there_may_be_some(ranks):
    """Three and more on a CPU do: their sums hang on the order of the buckets, which a search keeps from the first step
    on; without it a resumed run would add up otherwise in its first."""
    for rank, (looks, quiet) in enumerate(run_on_ranks(as_prepared, ranks)):
        assert looks == (True, True, 0.0), "gradients are views of one bucket; buffers are those of the first process"
        assert quiet == (ranks > 2, True, float(rank)), "buffers are left alone"


def _document() -> dict:
    images = [{"id": 3 + i, "file_name": f"street/{i}.jpg", "width": 90, "height": 60 + i} for i in range(4)]
    outline = [[5, 5, 25, 5, 25, 35, 5, 35]]
    annotations = [
        {"id": i, "image_id": 3 + i // 2, "category_id": 1 + i % 2, "bbox": [5, 5, 20, 30], "segmentation": outline}
        for i in range(6)
    ]
    categories = [{"id": 1, "name": "bus"}, {"id": 2, "name": "tram"}]
    relation = {"image_id": 3, "subject_id": 0, "object_id": 1, "predicate_id": 7}
    return {
        "images": images,
        "annotations": annotations,
        "categories": categories,
        "rel_categories": [{"id": 7, "name": "behind"}, {"id": 8, "name": "beside"}],
        "rel_annotations": [relation],
    }


def _change(document: dict, change: str) -> None:
    first = document["annotations"][0]
    changes = {
        "nothing": lambda: None,
        "folders": lambda: [image.update(file_name=f"part 2/{image['id'] - 3}.jpg") for image in document["images"]],
        "order of classes in the file": lambda: document["categories"].reverse(),
        "an image fewer": lambda: document["images"].pop(),
        "a box fewer": lambda: document["annotations"].pop(),
        "a box moved": lambda: first.update(bbox=[5.01, 5, 20, 30]),
        "another label": lambda: first.update(category_id=2),
        "a crowd": lambda: first.update(iscrowd=1),
        "an outline": lambda: first.update(segmentation=[[5, 5, 25, 5, 25, 35]]),
        "an area": lambda: first.update(area=77),
        "a class renamed": lambda: document["categories"][1].update(name="train"),
        "a class more": lambda: document["categories"].append({"id": 9, "name": "van"}),
        "a size": lambda: document["images"][3].update(height=70),
        "pictures exchanged": lambda: document["images"][2].update(file_name="street/9.jpg"),
        "images in another order": lambda: document["images"].reverse(),
        "a relation": lambda: document["rel_annotations"][0].update(predicate_id=8),
        "a predicate renamed": lambda: document["rel_categories"][0].update(name="above"),
    }
    changes[change]()


OTHER_DATA = {
    "nothing": "",
    "folders": "",
    "order of classes in the file": "",
    "an image fewer": "3 images, not 4",
    "a box fewer": "5 boxes, not 6; other boxes or labels in 1 of the images, such as street/2.jpg (id 5)",
    "a box moved": "other boxes or labels in 1 of the images, such as street/0.jpg (id 3)",
    "another label": "other boxes or labels in 1 of the images",
    "a crowd": "other boxes or labels in 1 of the images",
    "an outline": "other file names, sizes, areas, masks, attributes or relations in 1 of the images",
    "an area": "other file names, sizes, areas, masks, attributes or relations in 1 of the images",
    "a class renamed": "class 1 is train, not tram",
    "a class more": "class 2, van, is one more",
    "a size": "other file names, sizes, areas, masks, attributes or relations in 1 of the images, such as street/3.jpg",
    "pictures exchanged": "in 1 of the images, such as street/9.jpg (id 5)",
    "images in another order": "images with other ids or in another order",
    "a relation": "other file names, sizes, areas, masks, attributes or relations in 1 of the images",
    "a predicate renamed": "predicate 0 is above, not behind",
}


def told_of_other_data(folder: Path) -> dict[str, list[str]]:
    """What this rank is told, for each change of the data on all ranks but the first."""
    from toolkit.data.formats import open_dataset
    from toolkit.data.same_on_ranks import check_same_on_ranks

    rank, _ = world()
    told = {}
    for change in OTHER_DATA:
        document = _document()
        if rank:
            _change(document, change)
        file = folder / f"machine {rank}" / change / "train.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(document))
        reading = {"check_images": False, "masks": True, "cache_dir": folder / f"cache {rank}"}
        table = open_dataset(file, image_dir=file.parent, **reading)
        told[change] = []
        try:
            check_same_on_ranks({"training data": table, "validation data": table.head(2)})
        except BadInput as error:
            told[change] = error.problems
    return told


def test_other_data_on_another_machine_are_told_alike_on_every_rank_with_what_differs(tmp_path):
    first, *others = run_on_ranks(told_of_other_data, 3, tmp_path)
    assert others == [first, first]
    for change, words in OTHER_DATA.items():
        problems = first[change]
        assert bool(problems) == bool(words), change
        if words:
            assert "training data: rank 1, 2 on the machine " in problems[0] and words in problems[0], change


def test_a_restart_by_torchrun_does_not_see_what_the_processes_of_before_told_each_other(monkeypatch):
    """Its store is the same one; by an address of before, the faster process would look for one that is gone."""
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    of_agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port, "RANK": 0, "WORLD_SIZE": 2}
    for name, value in (of_agent | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    found = []
    for start in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        store, rank, world_size = next(torch.distributed.rendezvous(RESTARTABLE))
        found.append((rank, world_size, store.check(["address of rank 1"])))
        store.set("address of rank 1", "here")
    assert found == [(0, 2, False)] * 2


def test_what_ranks_are_to_have_imported_is_there():
    """The server that ranks are forked from silently skips modules that do not exist."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []
