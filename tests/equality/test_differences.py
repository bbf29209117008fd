"""The comparison of two records names every place where they differ."""

import math
from pathlib import Path

from equality.equality import Checkout, differences


def test_equal_records_have_no_differences():
    record = {"runs": {"a": {"loss": [1.0, None], "text": "one\ntwo"}}}
    assert differences(record, record) == []


def test_every_difference_is_named_with_its_place():
    before = {"a": {"loss": [1.0, 2.0], "gone": 1, "text": "one\ntwo"}, "rows": [1, 2]}
    after = {"a": {"loss": [1.0, 2.5], "new": 1, "text": "one\n2"}, "rows": [1]}
    assert differences(before, after) == [
        "/a/loss[1]: 2.0 | 2.5",
        "/a/gone: only before",
        "/a/text:\n    @@ -2 +2 @@\n    -two\n    +2",
        "/a/new: only after",
        "/rows: [1, 2] | [1]",
    ]


def test_the_last_bit_of_a_number_is_a_difference():
    assert differences({"loss": 0.1}, {"loss": 0.1}) == []
    assert differences({"loss": 0.1}, {"loss": math.nextafter(0.1, 1.0)}) != []


def test_texts_keep_nothing_of_place_and_time():
    checkout = Checkout.__new__(Checkout)
    checkout.folder = Path("/tmp/x")
    checkout.project = Path("/place/of/project")
    text = "/place/of/project/runs: eta 0:01:02  0.143 s/step  1.0 GiB, in 3.2 s; /tmp/x/shapes"
    same = "<project>/runs: eta <time>  <number> s/step  <number> GiB, in <time> s; <work>/shapes"
    assert checkout.plain(text) == same
