"""The arguments of `qc generate | chat | eval | search`, which are known without loading anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """The four commands as subparsers, each with the function that runs it."""
    command = commands.add_parser("generate", help="continue a text with a language model")
    _add_model(command)
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, help="a file with the text; - is stdin")
    _add_sampling(command)
    command.add_argument("--json", action="store_true", help="print one JSON object with text, tokens and times")
    command.set_defaults(run=lambda options: _commands().generate(options))

    command = commands.add_parser("chat", help="talk with a language model that has a chat template")
    _add_model(command)
    command.add_argument("--system", help="instructions that come before the chat")
    _add_sampling(command)
    command.add_argument("--json", action="store_true", help="print one JSON object per answer")
    command.set_defaults(run=lambda options: _commands().chat(options))

    command = commands.add_parser("eval", help="measure how well a text is predicted, and how far from a float model")
    _add_model(command)
    command.add_argument("text", type=Path, help="a text file in UTF-8")
    command.add_argument("--limit", type=int, help="read only so many bytes")
    command.add_argument("--special", action="store_true", help="special tokens that are spelled out are meant as such")
    command.add_argument(
        "--reference", type=Path, metavar="PATH",
        help="a folder, a .gguf or a .qca file, in floating point: divergence from its predictions",
    )  # fmt: skip
    command.add_argument(
        "--llama-cpp", type=Path, metavar="FILE", help="a .gguf file: llama.cpp's figures for the same tokens"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    command.set_defaults(run=lambda options: _commands().eval(options))
    _add_search(commands)


def _add_search(commands: Any) -> None:
    command = commands.add_parser("search", help="choose a format for each weight, within a budget")
    command.add_argument(
        "model", help="a .gguf file, a folder with config.json, or package.module:function as for qc compile"
    )
    command.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="FILE",
        help="text files in UTF-8 for a language model; for a function's model .npy or .npz files, an input each",
    )  # fmt: skip
    command.add_argument("--budget", required=True, help="'4.25 bits', '700 MB' or 'kl<0.01'")
    command.add_argument("--speed", help="a second budget, measured here: '3 ms', '1.2 x int4', '3 ms at 32 rows'")
    command.add_argument("--threads", type=int, help="threads of the measurements for --speed")
    command.add_argument(
        "--candidates", nargs="+", metavar="FORMAT", help="formats to choose from; float keeps a weight"
    )
    command.add_argument("-o", "--output", type=Path, required=True, help="the recipe to write, a .toml file")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the front as an .svg or .png file")
    command.add_argument("--report", type=Path, metavar="FILE", help="write what each weight costs as a .json file")
    command.add_argument("--limit", type=int, help="read only so many bytes of each text")
    command.add_argument("--max-seq-len", type=int, help="tokens of a piece of text (512)")
    command.add_argument(
        "--sensitivity", choices=("kl", "output"), default="kl",
        help="output: run the model to its end for one candidate of each weight only",
    )  # fmt: skip
    command.add_argument(
        "--measure", choices=("auto", "kl", "error"), default="auto", help="what of the outputs counts"
    )
    command.add_argument("--separate", action="store_true", help="q, k and v, or gate and up, may differ in format")
    command.add_argument("--workdir", type=Path, help="folder in which a killed search can continue")
    command.set_defaults(run=lambda options: _search_command().search(options))


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", type=Path, help="a .qca file, a .gguf file, or a folder with config.json")
    command.add_argument("--device", help="cpu, cuda:0 or sim:0")
    command.add_argument("--quant", help="for a folder or a .gguf file: a recipe such as q4_K for weights in floats")
    command.add_argument(
        "--compute",
        choices=("exact", "bf16", "int8"),
        help="for a folder or a .gguf file: the arithmetic of linears and experts with quantised weights, and of "
        "attention",
    )
    add_sizes(command, "for a folder or a .gguf file")
    adapter = command.add_mutually_exclusive_group()
    adapter.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="a LoRA or DoRA of PEFT, merged into the weights"
    )
    adapter.add_argument(
        "--adapter-beside", type=Path, metavar="FOLDER", help="a LoRA of PEFT, kept in floating point beside them"
    )


def add_sizes(command: argparse.ArgumentParser, where: str) -> None:
    """The options of a compile that decide the cache. `where`: of which models."""
    command.add_argument(
        "--max-seq-len", type=int, help=f"{where}: tokens in all (default: the model's, at most 4096)"
    )  # fmt: skip
    command.add_argument(
        "--kv-cache",
        default="auto",
        choices=("auto", "fp32", "bf16", "fp16", "int8", "fp8", "int4"),
        help=f"{where}: how the cache stores keys and values; default auto, by the arithmetic",
    )


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tokens", "--max-new-tokens", type=int, metavar="N", help="how many to generate at most"
    )  # fmt: skip
    for name, kind, place, text in (
        ("--temperature", float, "T", "draw tokens; above 1 unlikely ones more often (default: take the likeliest)"),
        ("--top-k", int, "K", "draw only from the K likeliest tokens"),
        ("--top-p", float, "P", "draw only from the fewest tokens that have this probability together"),
        ("--min-p", float, "P", "draw only from tokens with this share of the likeliest one's probability, or more"),
    ):
        command.add_argument(name, type=kind, metavar=place, help=text)
    command.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R",
        help="above 1: tokens that were there before are less likely (default: 1)",
    )  # fmt: skip
    command.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed draws the same tokens (0)")


def _commands() -> Any:
    from qcompiler.lm import commands  # the runtime, which takes longer to import than `qc --help` to print

    return commands


def _search_command() -> Any:
    from qcompiler.lm import search_command

    return search_command
