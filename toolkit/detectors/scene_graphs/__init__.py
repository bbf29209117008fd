"""Scene graphs: readers, relation heads and their detectors, metrics, and the section of a report."""
