"""Fixtures that several benches' tests share."""

import json
import shutil

import pytest


@pytest.fixture
def roomy_folder(tiny_folder, tmp_path):
    """The tiny model with a longer context in its config than it was made for."""
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder
