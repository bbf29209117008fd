"""One small data set with relations for all tests of scene graphs."""

import pytest
from scene_graph_data import edge_batch, shapes_table


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def batch(table):
    return edge_batch(table)
