"""Checkpoints in shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SaveShards = Callable[..., Path]


@pytest.fixture
def shards(tmp_path: Path) -> SaveShards:
    """Writes tensors to a folder, a few in each file, with an index."""

    def save(tensors: Mapping[str, torch.Tensor], per_file: int = 3, folder: Path = tmp_path / "model") -> Path:
        folder.mkdir(exist_ok=True)
        names, places = list(tensors), {}
        for number, first in enumerate(range(0, len(names), per_file)):
            file = f"model-{number:05}.safetensors"
            part = names[first : first + per_file]
            save_file({name: tensors[name].detach().contiguous().clone() for name in part}, folder / file)
            places.update(dict.fromkeys(part, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder

    return save
