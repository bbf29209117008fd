"""The data of a run: the loader of its batches, and what is known of the data sets."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch.utils.data import DataLoader

from toolkit.data.table import DetectionTable


@dataclass
class TrainingData:
    """The data of a run.

    loader: yields the batches of an epoch, from the place where the sampler stands.
    tables: "training" and "validation". A resumed run tells which of them have changed.
    """

    loader: DataLoader | None
    tables: Mapping[str, DetectionTable]

    kept_in_rollback = True

    @property
    def classes(self) -> dict[str, list]:
        """The names that predictions are made of, as JSON values."""
        table = self.tables["validation"]
        return {
            "categories": [asdict(category) for category in table.categories],
            "predicates": list(table.predicates),
            "attributes": list(table.attributes),
        }

    def state_dict(self) -> dict:
        """JSON values."""
        return {**self.classes, "tables": {name: table.identity for name, table in self.tables.items()}}

    def load_state_dict(self, state: Mapping) -> list[str]:
        """Compare the tables with those of a checkpoint, and return a sentence for each one that has changed.

        It may be so on purpose: the run goes on with the data that are there now.
        """
        before = state["tables"]
        notes = []
        for name, table in self.tables.items():
            change = table.changed_since(before[name]) if name in before else ""
            if change:
                notes.append(
                    f"the {name} data are not those of the checkpoint ({change}): the run goes on with what is there "
                    "now, and is not the one that was interrupted"
                )
        return notes
