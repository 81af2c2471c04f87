"""Examples in the help of every command, and scripts with which a shell completes them.

Each example is a command line that the parser takes; tests/cli/test_help.py checks that.
"""

from __future__ import annotations

import argparse
from typing import Any

from qcompiler.errors import MissingDependencyError

SHELLS = ("bash", "zsh", "fish")

EXAMPLES = {
    "compile": (
        "qc compile tiny_model:model -o tiny.qca --quant nf4",
        "qc compile tiny_model:model --weights none --timing",
        "qc compile model.gguf -o model.qca --kv-cache int8",
        "qc compile tiny_model:model -o tiny.qca --verify-each numerics --print-after fuse-epilogues",
    ),
    "run": ("qc run tiny.qca x.npy", "qc run model.qca ids=ids.npy mask=mask.npy -o results.npz"),
    "inspect": (
        "qc inspect tiny.qca",
        "qc inspect tiny.qca --stage fuse-epilogues",
        "qc inspect tiny.qca --op 'layers\\.0\\.mlp'",
        "qc inspect tiny.qca --diff import fuse-epilogues",
        "qc inspect tiny.qca --ledger --json",
    ),
    "opt": (
        "qc opt dumps/02-import.mlir -p canonicalize,cse,dce --print-after-change --timing",
        "qc opt --list",
    ),
    "reduce": (
        "qc reduce /tmp/qc-reproducer-x1y2z3/before-cse.mlir",
        "qc reduce dumps/*-pull-slices.mlir -p fuse-epilogues -o small.mlir --timeout 30",
    ),
    "bench": ("qc bench tiny.qca --dim batch=1", "qc bench model.qca --prompt 512 --generate 128 --json"),
    "convert": (
        "qc convert model.gguf folder --layout gptq",
        "qc convert folder model.gguf --quant q4_K_M --lossy",
    ),
    "generate": (
        "qc generate model.qca --prompt 'def mean(values):' --tokens 64",
        "qc generate model.gguf --prompt-file question.txt --temperature 0.7 --top-p 0.9 --seed 1",
    ),
    "chat": ("qc chat model.gguf --system 'You answer briefly.'",),
    "eval": ("qc eval model.qca text.txt --limit 65536", "qc eval folder text.txt --quant q4_0 --reference folder"),
    "search": ("qc search folder --data text.txt --budget '5 bits' --candidates nf4 int8 q4_K -o recipe.toml",),
    "doctor": ("qc doctor", "qc doctor --model tiny_model:model --device sim:0 --json"),
    "completion": ("qc completion bash",),
}

INSTALL = {
    "bash": "qc completion bash > ~/.local/share/bash-completion/completions/qc",
    "zsh": "qc completion zsh > ~/.zfunc/_qc     (a folder of $fpath, named before compinit)",
    "fish": "qc completion fish > ~/.config/fish/completions/qc.fish",
}


def add_completion(commands: Any) -> None:
    """`qc completion SHELL`, which prints a script."""
    command = commands.add_parser("completion", help="print the script with which a shell completes qc")
    command.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    command.set_defaults(run=lambda options: print(completion(options.parser, options.shell)))


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for a shell, made by shtab from the parser. MissingDependencyError without shtab."""
    try:
        import shtab
    except ImportError as error:
        raise MissingDependencyError(
            "shtab makes the scripts for shells: pip install 'qcompiler[completion]'"
        ) from error
    for each in (parser, *_commands(parser).values()):
        for action in each._actions:
            if _takes_a_path(action):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _takes_a_path(action: argparse.Action) -> bool:
    """Positional arguments are files, models among them; so are options of type Path, and some that are texts."""
    if action.choices is not None or isinstance(action, argparse._HelpAction | argparse._VersionAction):
        return False
    return getattr(action.type, "__name__", "") == "Path" or not action.option_strings or action.dest == "context"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return dict(_subparsers(parser).choices)


def _subparsers(parser: argparse.ArgumentParser) -> Any:
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return action


def finish(parser: argparse.ArgumentParser) -> None:
    """Gives every command its examples, and itself the way to completion and to the exit codes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [
            "`qc COMMAND --help` has examples. Exit status: 0 done; 1 an error, said in one message; 2 a wrong command",
            "line; 70 a bug, with a report; 130 Ctrl-C; 141 the reader of a pipe has gone.",
        ]
    )
    said = {choice.dest: choice.help for choice in _subparsers(parser)._choices_actions}
    for name, command in _commands(parser).items():
        text = said[name] or ""
        command.description = f"{text[:1].upper()}{text[1:]}."
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        lines = ["examples:", *(f"  {each}" for each in EXAMPLES.get(name, ()))]
        if name == "completion":
            lines += ["", "to install it:", *(f"  {each}" for each in INSTALL.values())]
        command.epilog = "\n".join(lines)


__all__ = ["EXAMPLES", "SHELLS", "add_completion", "completion", "finish"]
