"""A `final/` folder onto the Hugging Face hub."""

import json
from pathlib import Path

from toolkit.errors import BadInput
from toolkit.models.card import LICENCE, check_licence, write_card

LEFT_OUT = ("*.wrong", ".*")


def final_folder(source: str | Path) -> Path:
    """The `final/` folder of a run, or the one that was given. Raises BadInput when there is none."""
    path = Path(source).expanduser()
    for folder in (path, path / "final"):
        if (folder / "categories.json").is_file() and (folder / "config.json").is_file():
            return folder
    raise BadInput(f"{source}: neither a final/ folder nor a run that has one; a run that ends writes it")


def push(source: str | Path, name: str, *, private: bool = False, licence: str = LICENCE) -> str:
    """Writes the model card again, with what the run's report has found since, and uploads the folder.

    Args:
        source: run or `final/` folder.
        name: `user/name` on the hub; made when it is not there.

    Returns:
        the address of the model.

    Raises:
        BadInput: no such folder, no token, a name or token that the hub refuses, or no connection.
    """
    import httpx
    from huggingface_hub import HfApi, ModelCard, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    folder = final_folder(source)
    check_licence(licence)
    names = [each["name"] for each in json.loads((folder / "categories.json").read_text())]
    write_card(folder, names, licence)
    ModelCard.load(folder / "README.md")  # what the hub would refuse is refused here
    if get_token() is None:
        raise BadInput("--hub.push: there is no token of the hub: run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        api.upload_folder(
            repo_id=repository, folder_path=folder, ignore_patterns=list(LEFT_OUT), commit_message="Model and its card"
        )
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(f"--hub.push {name}: the hub did not take it: {reason}") from error
    return f"{api.endpoint}/{repository}"
