"""What a file of published weights says about the detector that it is of."""

from dataclasses import dataclass, field


@dataclass
class Description:
    """architecture and options: of `build_detector`. class_names: in the order of the rows. notes: what a user should
    know because the file itself cannot tell it, and the flag that says otherwise."""

    architecture: str
    options: dict
    class_names: list[str]
    notes: list[str] = field(default_factory=list)
