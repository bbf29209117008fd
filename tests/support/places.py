"""The places that tests read from."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
ASSETS = TESTS / "assets"
SMALL_CONFIGS = ASSETS / "configs"  # one for each training script, and a few more
SUPPORT = TESTS / "support"
# 364 images of blood cells, which are not part of the repository.
BCCD = Path(os.environ.get("DETECTION_TOOLKIT_BCCD") or ROOT.parent / "shared" / "data" / "bccd")
