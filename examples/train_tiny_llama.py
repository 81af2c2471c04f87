"""Trains the small language model of this repository: a byte-level Llama that has read Python's standard library.

    python examples/train_tiny_llama.py                    # about 20 minutes on two cores; continues where it stopped

The model is transformers' own Llama, so that every tool which knows that architecture can open it: hidden 256,
feed-forward 768, 6 layers, 4 heads of 64 with 2 heads of keys and values, 256 tokens (the bytes), tied embedding.
Its text is the source of the standard library it runs on, without tests; whole top-level modules are held out.
Matrices are trained by Muon (Jordan et al. 2024, as in `torch.optim.Muon`), the rest by AdamW, under bfloat16
autocast.  The state is saved every 100 steps, and an interrupted run continues from there with the same batches.

Written into `examples/models/tiny_llama/`: `model.safetensors` (bfloat16), `config.json`, `held_out.txt`, `loss.json`
and `loss.png`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

OUTPUT = Path(__file__).parent / "models" / "tiny_llama"
SEPARATOR = b"\0"  # stands between files; no source file holds it
NOT_TEXT = {"site-packages", "test", "tests", "idle_test", "lib2to3", "ensurepip", "__pycache__"}
NOT_TEXT |= {"encodings", "pydoc_data"}  # tables and manuals, not code
HELD_OUT_SHARE = 24  # one top-level module in so many is held out
HELD_OUT_BYTES = 262_144  # of the committed evaluation text


@dataclass(frozen=True)
class Recipe:
    """The settings that decide the result, in addition to the text."""

    steps: int = 1000
    batch: int = 16  # sequences in a step
    length: int = 512  # bytes in a sequence
    warmup: int = 60
    cosine: int = 2000  # steps of the full cosine
    cooldown: int = 200  # the last steps, which bring the rate down to zero
    muon_rate: float = 4e-3
    adam_rate: float = 3e-3
    weight_decay: float = 0.1
    seed: int = 0

    def rate(self, step: int) -> float:
        """The share of the peak learning rate at a step: linear up, the start of a cosine, and linear down to zero.

        So a run's length can be chosen late: only its last steps depend on it.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / (self.cosine - self.warmup))
        return (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))) * min(1.0, (self.steps - step) / self.cooldown)


def config() -> LlamaConfig:
    """The architecture, 4.5 M parameters."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def is_held_out(top_level: str) -> bool:
    """Whether a module is for evaluation: decided by its name alone, so that every Python version splits alike."""
    return int.from_bytes(hashlib.sha256(top_level.encode()).digest()[:4], "little") % HELD_OUT_SHARE == 0


def corpus(library: Path) -> tuple[bytes, bytes]:
    """(training text, held-out text): every source file of the library, by path, each followed by a NUL."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if NOT_TEXT.isdisjoint(place.parts):
            top_level = place.parts[0].removesuffix(".py")
            parts[is_held_out(top_level)].append(path.read_bytes().replace(SEPARATOR, b"") + SEPARATOR)
    return b"".join(parts[0]), b"".join(parts[1])


def optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(
        matrices, lr=recipe.muon_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def batch_at(text: torch.Tensor, recipe: Recipe, step: int) -> torch.Tensor:
    """(batch, length + 1) bytes: the same for a step in every run, so a resumed run sees the same batches."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    starts = torch.randint(0, len(text) - recipe.length - 1, (recipe.batch,), generator=generator)
    return torch.stack([text[s : s + recipe.length + 1] for s in starts.tolist()]).long()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats of each next byte."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: torch.Tensor, length: int, windows: int) -> float:
    """Mean bits of the next byte over `windows` evenly spaced sequences of `length`."""
    starts = torch.linspace(0, len(text) - length - 1, windows).long().tolist()
    rows = torch.stack([text[s : s + length + 1] for s in starts]).long()
    losses = [loss_of(model, chunk) for chunk in rows.split(16)]
    return float(torch.stack(losses).mean()) / math.log(2)


def write_result(folder: Path, model: LlamaForCausalLM, held_out: bytes, history: dict[str, object]) -> None:
    """Writes the files that are committed."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    state.pop("lm_head.weight")  # the embedding, tied
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.dtype = torch.bfloat16
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    (folder / "held_out.txt").write_bytes(held_out[:HELD_OUT_BYTES])
    (folder / "loss.json").write_text(json.dumps(history, indent=1) + "\n")
    plot(folder / "loss.png", history)


def plot(path: Path, history: dict[str, object]) -> None:
    """Bits per byte over steps, training and held out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    for name, label in (("train", "training batch (mean of 20 steps)"), ("held_out", "held-out modules")):
        points = history[name]
        assert isinstance(points, list)
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(1.0, 4.0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def save_state(path: Path, **state: object) -> None:
    """Written atomically."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def train(recipe: Recipe, state_file: Path, output: Path) -> None:
    """Trains from the start, or from the saved state, and writes the result."""
    train_text, held_out_text = corpus(Path(sysconfig.get_paths()["stdlib"]))
    text = torch.frombuffer(bytearray(train_text), dtype=torch.uint8)
    held_out = torch.frombuffer(bytearray(held_out_text[:HELD_OUT_BYTES]), dtype=torch.uint8)
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(config())
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters; {len(train_text):,} bytes to read, {len(held_out_text):,} held out")
    history: dict[str, object] = {
        "recipe": asdict(recipe), "python": platform.python_version(), "torch": str(torch.__version__),
        "train_bytes": len(train_text), "held_out_bytes": len(held_out_text), "parameters": parameters,
        "seconds": 0.0, "cpu_seconds": 0.0, "train": [], "held_out": [],
    }  # fmt: skip
    optims = optimizers(model, recipe)
    first = 0
    if state_file.exists():
        saved = torch.load(state_file, weights_only=True)
        if saved["recipe"] != asdict(recipe):
            raise SystemExit(f"{state_file} is of another recipe; delete it to start afresh")
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optims, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first, history = saved["step"], saved["history"]
        print(f"going on from step {first}")
    run_steps(model, optims, recipe, text, held_out, history, first, state_file)
    write_result(output, model, held_out_text, history)
    print(f"written to {output} after {float(str(history['seconds'])) / 60:.0f} minutes of training")


def run_steps(
    model: LlamaForCausalLM,
    optims: list[torch.optim.Optimizer],
    recipe: Recipe,
    text: torch.Tensor,
    held_out: torch.Tensor,
    history: dict[str, object],
    first: int,
    state_file: Path,
) -> None:
    """The steps from `first` on; fills `history` and saves the state every 100."""
    peaks = [group["lr"] for optimizer in optims for group in optimizer.param_groups]
    recent: list[float] = []
    train_points, held_out_points = history["train"], history["held_out"]
    assert isinstance(train_points, list) and isinstance(held_out_points, list)
    before, cpu_before = float(str(history["seconds"])), float(str(history["cpu_seconds"]))
    began, cpu_began = time.monotonic(), time.process_time()
    for step in range(first, recipe.steps):
        groups = [group for optimizer in optims for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * recipe.rate(step)
        loss = loss_of(model, batch_at(text, recipe, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optims:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item() / math.log(2))
        if (step + 1) % 20 == 0:
            train_points.append([step + 1, round(sum(recent) / len(recent), 4)])
            recent.clear()
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            held_out_points.append([step + 1, round(bits_per_byte(model, held_out, recipe.length, 128), 4)])
            history["seconds"] = before + time.monotonic() - began
            history["cpu_seconds"] = cpu_before + time.process_time() - cpu_began
            print(
                f"step {step + 1}: {train_points[-1][1]:.3f} bits per byte, held out {held_out_points[-1][1]:.3f}, "
                f"{history['seconds']:.0f} s", flush=True,
            )  # fmt: skip
            save_state(
                state_file, step=step + 1, recipe=asdict(recipe), history=history,
                model=model.state_dict(), optimizers=[o.state_dict() for o in optims],
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--state", type=Path, default=Path("tiny_llama_training.pt"), help="where a run can go on from")
    options = parser.parse_args()
    train(Recipe(steps=options.steps), options.state, options.output)


if __name__ == "__main__":
    main()
