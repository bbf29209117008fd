"""Publishes a finished run: writes its report and its model card, and uploads `final/` to the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.tools.publish.card import LICENCE, check_licence, write_card
from toolkit.tools.report import write_report


def final_folder(source: str | Path) -> Path:
    """Return the `final/` folder `source`, or the one in the run folder `source`. Raises BadInput if there is none."""
    path = Path(source).expanduser()
    for folder in (path, path / "final"):
        if (folder / "categories.json").is_file() and (folder / "config.json").is_file():
            return folder
    raise BadInput(f"{source}: neither a final/ folder nor a run that has one; a run that ends writes it")


def report_and_card(run_folder: Path, table, trained: bool) -> None:
    """Write the report of a finished run, and then its model card again, with the confidence intervals of the report.

    Args:
        table: the validation data.
        trained: True: the run has trained a model; False: it has only evaluated, and the card is not written.
    """
    write_report(run_folder, table, state="done")  # status.json is written after the report
    card = run_folder / "final" / "README.md"
    if trained and card.is_file():
        write_card(card.parent, table.class_names)


def write_run_card(source: str | Path, licence: str = LICENCE) -> Path:
    """Write the model card of a run or `final/` folder again, with the results of the run's report; return the file.

    licence: see `write_card`. Raises BadInput if the folder does not exist, the name of the licence is not valid, or a
    file of the run is damaged.
    """
    folder = final_folder(source)
    check_licence(licence)
    try:
        names = [category["name"] for category in read_json(folder / "categories.json", list)]
        return write_card(folder, names, licence)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInput(f"{folder}: a file there or of its run is not as a run writes it: {error!r}") from error


def push(source: str | Path, name: str, *, private: bool = False, licence: str = LICENCE, say=print) -> str:
    """Write the model card again, upload the `final/` folder to the Hugging Face hub, and return the model's address.

    Args:
        source: a `final/` folder, or the run folder with the one to upload.
        name: `user/name` of the repository on the hub, which is created if it does not exist.
        private: make a new repository private.
        licence: see `write_card`.
        say: called with a message that has the address.

    Raises:
        BadInput: the folder does not exist; a token or a connection is missing; or the hub refuses name or token.
    """
    from huggingface_hub import ModelCard
    from huggingface_hub.utils import validate_repo_id

    with _hub(name):  # before the card is written
        validate_repo_id(name)
    card = write_run_card(source, licence)
    ModelCard.load(card)  # raises here for a card that the hub would refuse
    with _hub(name) as api:
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        what = {"folder_path": card.parent, "ignore_patterns": ["*.wrong", ".*"]}
        api.upload_folder(repo_id=repository, **what, commit_message="Model and its card")
    address = f"{api.endpoint}/{repository}"
    say(f"uploaded: {address}")
    return address


def check_push(name: str) -> None:
    """Check before a training that `push` will be allowed to write to the repository `name` on the Hugging Face hub.

    Nothing is changed there.

    Raises:
        BadInput: a token or a connection is missing, the token may only read, or the name is not valid or belongs to
            another user.
    """
    from huggingface_hub.utils import validate_repo_id

    with _hub(name) as api:
        validate_repo_id(name)
        me = api.whoami()
    owner = name.rpartition("/")[0]
    owners = [account["name"] for account in (me, *me.get("orgs", []))]
    if owner and owner not in owners:
        raise BadInput(f"--hub.push {name}: the token of the hub writes for {', '.join(owners)} only, not for {owner}")
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise BadInput(f"--hub.push {name}: the token of the hub may only read; make one that may write")


@contextmanager
def _hub(name: str) -> Iterator:
    """Yield the hub's client; a refusal, a failed connection or a missing token inside the block is raised as
    BadInput."""
    import httpx
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if get_token() is None:
        raise BadInput("--hub.push: no token of the hub was found: run `hf auth login`, or set HF_TOKEN")
    try:
        yield HfApi()
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(f"--hub.push {name}: the hub did not accept it: {reason}") from error
