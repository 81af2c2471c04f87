"""Chat templates: the text that transformers renders, and an end to templates that have none."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from qcompiler.errors import ChatTemplateError
from qcompiler.lm.text.budget import MAX_TEXT
from qcompiler.lm.text.template import ChatTemplate

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "Wie geht's? 你好 <b>&\"'"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nGut {{ x }}."},
    {"role": "user", "content": "  Und {% dir %}?  "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é": [1, 2.5, None, True]}}}]

STYLES = {
    "ChatML": (
        "{%- for m in messages %}\n{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
    ),
    "Llama 3": (
        "{{ bos_token }}{% if not date is defined %}{% set date = '26 Jul 2024' %}{% endif %}"
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "<|start_header_id|>system<|end_header_id|>\n\nToday: {{ date }}\n{{ system }}<|eot_id|>"
        "{% for m in messages %}{% if not (m.role == 'ipython' or 'tool_calls' in m) %}"
        "{{ '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\\n\\n' ~ m['content'] | trim ~ '<|eot_id|>' }}"
        "{% endif %}{% endfor %}"
        "{% if tools is not none and tools %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    ),
    "Qwen 3": (
        "{%- if tools %}\n    {{- '<tools>' }}\n    {%- for tool in tools %}\n"
        "        {{- '\\n' }}{{- tool | tojson }}\n"
        "    {%- endfor %}\n    {{- '\\n</tools>' }}\n{%- endif %}\n"
        "{%- set ns = namespace(multi=true, last=messages|length - 1) %}\n"
        "{%- for m in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
        "    {%- if ns.multi and m.role == 'user' and m.content is string and not "
        "(m.content.startswith('<t>') and m.content.endswith('</t>')) %}\n"
        "        {%- set ns.multi = false %}\n        {%- set ns.last = index %}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- for m in messages %}\n    {%- set content = m.content %}\n"
        "    {%- if '</think>' in content %}\n"
        "        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n    {%- endif %}\n"
        "    {%- if loop.first or loop.index0 > ns.last or (not loop.last and loop.nextitem.role == 'user') %}\n"
        "        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}"
    ),
    "Mistral": (
        "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}{{ bos_token }}"
        "{%- for m in messages if m.role != 'system' %}"
        "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{%- endif %}"
        "{%- if m.role == 'user' %}{{ '[INST] %s%s [/INST]' % (system + '\\n\\n' if loop.last else '', m.content) }}"
        "{%- else %}{{ ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}"
    ),
    "Gemma": (
        "{{ bos_token }}\n{% for m in messages %}\n"
        "    {% set role = 'model' if m.role == 'assistant' else m['role'] %}\n"
        "    {{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}\n"
    ),
    "Phi 3": (
        "{% for m in messages %}{% if m['role'] in ['user', 'system'] and m['content'] %}"
        "{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'assistant' %}"
        "{% generation %}{{ '<|assistant|>\\n' + m['content'] + '<|end|>\\n' }}{% endgeneration %}"
        "{% endif %}{% endfor %}"
    ),
    "macros, captures and filters": (
        "{% macro item(k, v, deep=false) %}[{{ k }}:{{ v | default('-', true) }}{{ '!' if deep }}]{% endmacro %}"
        "{% set all %}{% for m in messages %}{{ item(m.role, m.content[:4], loop.first) }}{% endfor %}{% endset %}"
        "{{ all | upper | replace('[', '(') }}{{ messages | map(attribute='role') | unique | sort | join('/') }}"
        "{% for k, v in messages[0] | dictsort %}{{ k }}={{ v | length }};{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ loop.cycle('a', 'b') }}{{ k | capitalize }}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [1, 2] + [3] }}"
        "{{ {'a': none}, (1,) }}"
        "{{ range(3) | list }}{{ undefined_name }}{{ (messages | first).role }}{{ '%-5s|%03d' | format('ab', 7) }}"
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.revindex }}{% endfor %}"
        "{{ 'a,b'.split(',') | last }}{{ dict(a=1) }}{{ 'ab' * 3 }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ [1, 'é\\n'] | string }}"
        "{{ '<&>' | e }}{{ 'x\\ny' | indent(2) }}{{ 3.5 | int }}"
        "{{ messages | tojson(ensure_ascii=true, sort_keys=true) }}"
        "{{ strftime_now('%Y') | length }}{{ 'b' in 'abc' }}{{ messages is iterable }}{{ 1 if false }}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_the_text_is_that_of_transformers(style: str, generation_prompt: bool, tools: Any) -> None:
    messages = TALK[1:] if style == "Gemma" else TALK
    (expected,), _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=STYLES[style], add_generation_prompt=generation_prompt,
        **NAMES,
    )  # fmt: skip
    variables = {"messages": messages, "add_generation_prompt": generation_prompt, "tools": tools, **NAMES}
    assert ChatTemplate(STYLES[style]).render(variables) == expected
    assert len(expected) > 50


# --- templates without an end ----------------------------------------------------------------------------------------


def growing(start: str, step: str) -> str:
    """Sixty-four steps, each of which makes a value at least twice as large."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(64) %}}{{% set ns.x = {step} %}}{{% endfor %}}"


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "captured output": "{% set x %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
    "~": growing("'a'", "ns.x ~ ns.x"),
    "+": growing("'a'", "ns.x + ns.x"),
    "list +": growing("[1]", "ns.x + ns.x"),
    "lists": growing("1", "[ns.x, ns.x]"),
    "tuples": growing("1", "(ns.x, ns.x)"),
    "dicts": growing("1", "{'a': ns.x, 'b': ns.x}"),
    "dict()": growing("1", "dict(a=ns.x, b=ns.x)"),
    "format": growing("'a'", "'%s%s' % (ns.x, ns.x)"),
    "replace": growing("'ab'", "ns.x.replace('a', ns.x)"),
    "filter replace": growing("'ab'", "ns.x | replace('a', ns.x)"),
    "join": growing("'ab'", "ns.x.join([ns.x, ns.x])"),
    "filter join": growing("'ab'", "[ns.x, ns.x] | join(ns.x)"),
    "string": growing("'ab'", "[ns.x, ns.x] | string"),
    "tojson": growing("'ab'", "[ns.x, ns.x] | tojson"),
    "escape": growing("'&'", "(ns.x ~ ns.x) | e"),
    "indent": growing("'a\\n'", "[ns.x, ns.x] | join | indent(64)"),
    "safe": growing("'ab' | safe", "ns.x.join(['<', '<', '<'])"),
    "many large texts": (
        "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
        "{% set ns.l = ns.l + ['a' * 9999999 ~ i] %}{% endfor %}"
    ),
    "a large list": "{{ ['a' * 9999999] * 9999 }}",
    "*": "{{ 'a' * 10**10 }}",
    "list *": "{% set x = [0] * 10**9 %}",
    "slices": "{% set x = [1] * 99999 %}{% for i in range(9999) %}{% for j in x[1:] %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "numbers": growing("3", "ns.x * ns.x"),
    "width": "{{ '%0999999999d' % 1 }}",
    "width from a value": "{{ '%*d' % (999999999, 1) }}",
    "filter width": "{{ '%999999999s' | format(1) }}",
    "method format": "{{ '{:>999999999}'.format(1) }}",
    "format_map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(999999999) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ '1'.zfill(999999999) }}",
    "expandtabs": "{{ '\\t'.expandtabs(999999999) }}",
    "time": "{{ strftime_now('%999999999d') }}",
    "json width": "{{ [1] | tojson(indent=999999999) }}",
    "json separators": "{{ [1, 2] | tojson(separators=['a' * 9999999, ':']) }}",
    "range": "{{ range(10**9) | list }}",
    "lorem": "{{ lipsum(9999) }}",
    "brackets": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "sums": "{{ " + "1+" * 50_000 + "1 }}",
    "a long number": "{{ " + "9" * 100_000 + " }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_without_an_end_is_stopped(name: str) -> None:
    started = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError, match=r"chat template"):
        ChatTemplate(HOSTILE[name]).render({"messages": TALK})
    assert time.process_time() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # KiB


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__['jinja2'] }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "a filter for attributes": "{{ ('' | attr('__class__')).__mro__ }}",
    "attributes by map": "{{ [''] | map(attribute='__class__.__mro__') | first | list }}",
    "the caller's message": "{{ messages.append(1) }}",
    "the caller's dict": "{{ messages[0].update({'role': 'system'}) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a hidden name": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "a hidden name at once": "{{ namespace({'_Namespace__attrs': 1}) }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "a method of a text": "{{ 'a'.encode('utf-16') }}",
    "an internal filter": "{{ messages | #counted }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_reaches_nothing_but_its_messages(name: str) -> None:
    messages = [dict(each) for each in TALK]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(ESCAPES[name]).render({"messages": messages})
    assert messages == TALK


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_names_the_line_and_the_message() -> None:
    refusing = (
        "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{{ raise_exception('no answers') }}\n"
        "{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match=r"line 3 .*message 2 \(role 'assistant'\) refuses .*no answers"):
        ChatTemplate(refusing).render({"messages": TALK})
    with pytest.raises(ChatTemplateError, match=r"line 2 .*no valid Jinja"):
        ChatTemplate("a\n{% for %}")
    with pytest.raises(ChatTemplateError, match=r"line 2 .*'dict object' has no attribute 'x'"):
        ChatTemplate("\n{{ messages[0].x.y }}").render({"messages": TALK})


def test_a_value_that_is_no_plain_data_is_refused_with_its_place() -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]\['content'\] is .*type object"):
        ChatTemplate("x").render({"messages": [{"role": "user", "content": object()}]})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ChatTemplateError, match="nested more than 64 deep"):
        ChatTemplate("x").render({"messages": loop})


def test_large_chats_render() -> None:
    """A thousand messages of ten kilobytes, with the pattern that copies each message several times."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": "x" * 10_000} for place in range(1000)]
    rendered = ChatTemplate(STYLES["Qwen 3"]).render({"messages": messages})
    assert 5_000_000 < len(rendered) < MAX_TEXT


def test_renderings_at_once_have_budgets_of_their_own() -> None:
    template = ChatTemplate("{% for i in range(600) %}{% for j in range(500) %}{% endfor %}{% endfor %}{{ messages }}")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda place: template.render({"messages": place}), range(8)))
    assert found == [str(place) for place in range(8)]


def test_an_old_jinja2_is_refused() -> None:
    program = (
        "import jinja2; jinja2.__version__ = '3.1.5'\n"
        "from qcompiler.lm.text.template import ChatTemplate\nChatTemplate('x')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "3.1.6 is needed" in done.stderr
