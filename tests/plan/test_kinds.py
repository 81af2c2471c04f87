"""Kinds of kernel: each is declared once and has every part, and one that is declared by half is an error."""

from __future__ import annotations

import typing
from types import ModuleType

import msgspec
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu import emit as cpu
from qcompiler.kernels.cuda import emit as cuda
from qcompiler.kernels.kinds import FORMS, described
from qcompiler.kernels.numbered import size_fields
from qcompiler.plan import kinds
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import AnyBody, KernelSpec, Operand
from qcompiler.plan.kernel_body import Contract, RoleKernel
from qcompiler.plan.kinds import KINDS, declared, modules_of
from qcompiler.plan.kinds.argmax import ArgmaxKernel

NUMBERS_AS_TEXT = {"loop.init"}
"""Fields with text that is neither a size nor a word: the contract takes nothing but numbers there."""


def test_every_table_of_kinds_is_the_list_of_declarations() -> None:
    assert len(KINDS) >= 16
    assert set(typing.get_args(AnyBody)) == set(KINDS.values())
    for target, table in (("cpu", cpu.TEMPLATES), ("cuda", cuda.TEMPLATES)):
        assert set(table) == {kind for kind, body in KINDS.items() if target not in body.lacks}
    assert set(cuda.ENGINES) == set(cuda.TEMPLATES)
    assert all(reason for body in KINDS.values() for reason in body.lacks.values())


def test_every_kind_but_loops_has_operands_with_roles() -> None:
    assert {kind for kind, body in KINDS.items() if not issubclass(body, RoleKernel)} == {"loop", "parts"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_record_that_holds_text_is_a_size_or_a_word(kind: str) -> None:
    """`numbered` renames the symbols in sizes, so that no string of a file becomes an identifier."""
    fields = {field.name: field.type for field in msgspec.structs.fields(KINDS[kind])}
    for name, hint in fields.items():
        text = str in _parts(hint)
        assert text == (name in size_fields(KINDS[kind])) or f"{kind}.{name}" in NUMBERS_AS_TEXT


def _parts(hint: object) -> set[object]:
    return {hint, *(each for arg in typing.get_args(hint) for each in _parts(arg))}


# --- half a declaration ----------------------------------------------------------------------------------------------


def module_with(*classes: type, name: str = "novel") -> ModuleType:
    module = ModuleType(f"qcompiler.plan.kinds.{name}")
    for each in classes:
        each.__module__ = module.__name__
        setattr(module, each.__name__, each)
    return module


class WithoutCost(RoleKernel, frozen=True, tag="novel"):
    rows: Dim

    def contract(self, operands: int) -> Contract:
        return Contract((), work=(self.rows,))


class WithoutContract(RoleKernel, frozen=True, tag="novel"):
    def operations(self, operands: typing.Sequence[Operand], symbols: typing.Mapping[str, int]) -> int:
        return 0


class Novel(WithoutCost, frozen=True, tag="novel"):
    def operations(self, operands: typing.Sequence[Operand], symbols: typing.Mapping[str, int]) -> int:
        return 0


def test_a_record_without_a_part_is_an_error_that_names_it() -> None:
    with pytest.raises(NotImplementedError, match="novel: WithoutCost has no operations"):
        declared(module_with(WithoutCost))
    with pytest.raises(NotImplementedError, match="novel: WithoutContract has no contract"):
        declared(module_with(WithoutContract))
    with pytest.raises(NotImplementedError, match="declares one subclass of KernelBody; it has 0"):
        declared(module_with())
    with pytest.raises(NotImplementedError, match="it has 2"):
        declared(module_with(WithoutCost, Novel))
    with pytest.raises(NotImplementedError, match="tag of Novel is 'novel'; it must be the module's name"):
        declared(module_with(Novel, name="other"))
    assert declared(module_with(Novel)) is Novel


def test_a_kind_without_a_template_is_an_error_unless_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("emit", "scratch_bytes", "headers")
    monkeypatch.setattr(kinds, "KINDS", {**KINDS, "novel": Novel})
    with pytest.raises(NotImplementedError, match=r"'novel' has no module qcompiler.kernels.cpu.novel: .*Novel.lacks"):
        modules_of("qcompiler.kernels.cpu", parts, "cpu", printed=FORMS)
    monkeypatch.setattr(Novel, "lacks", {"cpu": "it is a test's"})
    own = modules_of("qcompiler.kernels.cpu", parts, "cpu", printed=FORMS)
    assert own.keys() | FORMS.keys() == KINDS.keys()
    with pytest.raises(
        NotImplementedError,
        match=r"kernels.cuda.novel: write it, describe it for every target in",
    ):
        modules_of("qcompiler.kernels.cuda", ("emit",), "cuda", printed=FORMS)


def test_a_template_without_a_function_is_an_error_that_names_it() -> None:
    with pytest.raises(NotImplementedError, match=r"kernels.cpu.attention has no print_it"):
        modules_of("qcompiler.kernels.cpu", ("emit", "print_it"), "cpu", printed=FORMS)


def test_a_kind_is_printed_where_a_target_has_no_module_of_it() -> None:
    for target, table in (("cpu", cpu), ("cuda", cuda)):
        own = modules_of(f"qcompiler.kernels.{target}", (), target, printed=FORMS)
        for kind in FORMS:
            assert isinstance(table._TEMPLATES[kind], table.Printed) == (kind not in own)
    for kind in FORMS:
        printed = [isinstance(table._TEMPLATES[kind], table.Printed) for table in (cpu, cuda)]
        assert any(printed), f"no target prints {kind}"


def test_a_description_of_no_kind_or_without_a_form_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match=r"kernels.kinds.novel: no kernel kind is called 'novel'"):
        described(ModuleType("qcompiler.kernels.kinds.novel"))
    with pytest.raises(NotImplementedError, match=r"kernels.kinds.argmax has no form"):
        described(ModuleType("qcompiler.kernels.kinds.argmax"))


def test_a_target_that_lacks_a_kind_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Operand(name="x", dtype="f32", access="r", shape=(1, 4, 1), strides=(4, 1, 1))
    out = Operand(name="out", dtype="i64", access="w", shape=(1, 1), strides=(1, 1))
    spec = KernelSpec(name="k", symbols=(), operands=(x, out), body=ArgmaxKernel(outer=1, length=4, inner=1))
    monkeypatch.setattr(ArgmaxKernel, "lacks", {"cpu": "no hands", "cuda": "no feet"})
    for table in (cpu, cuda):
        monkeypatch.setattr(table, "_TEMPLATES", {k: v for k, v in table._TEMPLATES.items() if k != "argmax"})
    with pytest.raises(KernelSelectionError, match="no hands"):
        cpu.emit_kernel(spec, "generic")
    with pytest.raises(KernelSelectionError, match="no feet"):
        cuda.emit_kernel(spec, "sm_80")
