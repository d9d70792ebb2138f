"""Chat templates: as transformers renders them, refused clearly, and never endless."""

import time

import pytest

from aserve.errors import RequestError
from aserve.text import chat

# SmolLM2-135M-Instruct's own.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)

# What Qwen's, Llama's and Mistral's templates are made of.
FEATURES = """
{%- macro field(name, value) -%}
    {{ name }}={{ value | tojson }};
{%- endmacro -%}
{{- bos_token }}
{%- set ns = namespace(seen=0, last='') %}
{%- if tools %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}{{ '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- set ns.last = ns.last ~ message.role[:1] ~ loop.index0 %}
    {%- if loop.last and loop.length > 1 %}{{ 'last of ' ~ loop.length }}{% endif %}
{%- endfor %}
{%- for message in messages if message.role != 'tool' %}
    {%- generation %}{{ message.role | upper }}: {{ message.content | trim }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- field(call.function.name, call.function.arguments) }}
    {%- endfor %}
    {%- if 'x' in message.content %}{{ message.content.split('x')[-1].lstrip('\\n') }}{% endif %}
    {%- if message.content is string and message.content is not none %}|{% endif %}
{%- endfor %}
{{ ns.seen }} {{ ns.last }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

TALKS = [
    [{"role": "user", "content": 'Hi <b>& "you"</b> é 日本'}],
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "x\n y"}],
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"é": [1, "<"]}}}
            ],
        },
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]


@pytest.mark.parametrize("template", [SMOLLM2, FEATURES])
@pytest.mark.parametrize("talk", TALKS)
def test_prompts_are_those_of_transformers(template: str, talk: list[dict[str, object]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for generation in (True, False):
        for tools in (None, TOOLS):
            special = {"bos_token": "<s>", "eos_token": "</s>"}
            [theirs], _ = render_jinja_template(
                [talk],
                tools=tools,
                chat_template=template,
                add_generation_prompt=generation,
                enable_thinking=False,
                **special,
            )
            ours = chat.render(
                template,
                talk,
                tools=tools,
                add_generation_prompt=generation,
                special_tokens=special,
                enable_thinking=False,
            )
            assert ours == theirs


def test_smollm2_adds_its_system_turn() -> None:
    assert chat.render(SMOLLM2, [{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_content_may_come_in_parts_or_not_at_all() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant"}]
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert chat.render(template, talk) == "[one two][]"


def test_tool_arguments_sent_as_text_reach_the_template_as_an_object() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    talk = [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]
    template = "{{ messages[0].tool_calls[0].function.arguments.a + 1 }}"
    assert chat.render(template, talk) == "2"
    assert function["arguments"] == '{"a": 1}'  # the client's own message is left alone


USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"content": "Hi"}], "messages.0 needs a role"),
        ([{"role": "user", "content": 3}], "messages.0.content must be"),
        ([*USER, {"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; this model"),
        ([{"role": "user", "content": ["Hi"]}], "a part without a type"),
        ([{"role": "a", "tool_calls": [{"function": {}}]}], "needs a function with a name"),
        (
            [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments of f are not JSON",
        ),
    ],
)
def test_bad_messages_are_refused(messages: list[dict[str, object]], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        chat.render(SMOLLM2, messages)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "^Roles must alternate$"),
        ("{{ messages[7].content }}", "failed on these messages"),
        ("{{ 1 / 0 }}", "failed on these messages"),
        ("{{ messages + 1 }}", "failed on these messages"),
        ("{% if %}", "not valid, line 1"),
        ("{% include 'x' %}", "failed on these messages"),
        ("{{ messages.__class__.__mro__ }}", "failed on these messages"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "failed on these messages"),
        ("{{ messages.append(1) }}", "failed on these messages"),
        (None, "no chat template.*--model.chat_template"),
    ],
)
def test_what_a_template_will_not_do_is_told(template: str | None, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        chat.render(template, USER)
    assert caught.value.status == 400


def test_client_variables_may_not_replace_ours() -> None:
    with pytest.raises(RequestError, match="may not set bos_token, eos_token"):
        chat.render(SMOLLM2, USER, eos_token="x", bos_token="y", enable_thinking=True)


ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops in a set": (
        "{% set x %}{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}"
        "{% endfor %}{% endset %}"
    ),
    "constant text in a block": (
        "{% set x %}{% for i in range(99999) %}" + "y" * 50_000 + "{% endfor %}{% endset %}"
    ),
    "constant text in a macro": (
        "{% macro m() %}" + "y" * 50_000 + "{% endmacro %}"
        "{% set x %}{% for i in range(99999) %}{{ m() }}{% endfor %}{% endset %}"
    ),
    "doubling macro": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "branching macro": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "doubling text": (
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
    ),
    "doubling by ~": (
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "doubling lists": (
        "{% set n = namespace(x=[1]) %}"
        "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ n.x }}"
    ),
    "times": "{{ 'x' * 10**10 }}",
    "squaring": (
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"
    ),
    "list times": "{{ ([messages] * 10**9)[0] }}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "center": "{{ 'x' | center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "str format": "{{ '{:10000000000}'.format(1) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "replace": "{{ ('x' * 60000) | replace('x', 'y' * 60000) }}",
    "str replace": "{{ ('x' * 60000).replace('x', 'y' * 60000) }}",
    "join": "{{ (['x'] * 60000) | join('y' * 60000) }}",
    "str join": "{{ ('y' * 60000).join(['x'] * 60000) }}",
    "indent": "{{ ('\n' * 60000) | indent(60000) }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "joined lists": "{{ ([('x' * 60000)] * 60000) | join }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long": "x" * (1 << 21),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_no_template_runs_away(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        chat.render(ENDLESS[name], USER)
    assert caught.value.status == 400
    assert time.monotonic() - started < chat.SECONDS_MAX + 5


def test_a_long_conversation_is_no_runaway() -> None:
    talk = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "y" * 999}]
    text = chat.render(FEATURES, talk * 300)
    assert len(text) > 300 * 1900


def test_templates_tell_the_date() -> None:
    year = chat.render("{{ strftime_now('%Y') }}", USER)
    assert int(year) >= 2025
