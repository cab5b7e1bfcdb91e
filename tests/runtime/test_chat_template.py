"""Chat templates: what models expect of the environment, what foreign templates must not reach, what is refused."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from pykv.errors import ChatTemplateError
from pykv.runtime.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate") }}
    {%- endif -%}
    {{ '<start_of_turn>' + message['role'] + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}"""
HELLO = [{"role": "user", "content": " Hello "}]


def render(source: str, messages=HELLO, **extra) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **extra)


def test_chatml_with_the_default_system_message():
    assert render(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt_the_conversation_ends_as_it_is():
    chat = [{"role": "system", "content": "S"}, *HELLO]
    assert render(CHATML, chat, add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n"
    )


def test_gemma_begins_with_bos_and_trims():
    assert render(GEMMA) == "<s><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n"


def test_a_template_may_refuse_in_its_own_words():
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        render(GEMMA, [{"role": "system", "content": "S"}])


def test_blocks_leave_no_line_and_no_indent_behind():
    assert render("{% if true %}\n  a\n  {% endif %}\nb\n\nc") == "  a\nb\n\nc"


def test_tokens_tools_and_further_values_are_there():
    source = "{{ bos_token }}{{ eos_token }}{{ tools[0].name }}{{ enable_thinking }}{{ missing }}"
    assert render(source, tools=[{"name": "f"}], enable_thinking=False) == "<s></s>fFalse"
    assert render("{{ tools is none }}") == "True"


def test_json_is_written_as_models_read_it():
    assert render("{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}") == '{"b": "<é>", "a": [1, null, true]}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}") == '{\n  "a": 2,\n  "b": 1\n}'
    assert render("{{ ['é'] | tojson(ensure_ascii=true, separators=(',', ':')) }}") == '["\\u00e9"]'


def test_loop_controls_and_generation_marks_work():
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}!") == "user!"


def test_the_date_is_todays():
    before, said, after = datetime.now(), render("{{ strftime_now('%Y-%m-%d') }}"), datetime.now()
    assert said in {before.strftime("%Y-%m-%d"), after.strftime("%Y-%m-%d")}


def test_text_is_not_escaped_for_html():
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "<&'\">"}]) == "<&'\">"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__class__.__base__.__subclasses__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self._TemplateReference__context }}{{ self.__init__.__globals__ }}",
        "{{ (''|attr('__class__')).x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_cannot_reach_what_lies_behind_its_values(attack):
    with pytest.raises(ChatTemplateError, match="the chat template failed: "):
        render(attack)


@pytest.mark.parametrize("attribute", ["strftime_now.__globals__", "''|attr('__class__')", "messages.__class__"])
def test_internal_attributes_read_as_nothing(attribute):
    assert render("{{ " + attribute + " }}") == ""


@pytest.mark.parametrize(
    "change",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].clear() }}",
        "{{ tools.pop() }}",
    ],
)
def test_a_template_cannot_change_what_it_is_given(change):
    messages, tools = [dict(message) for message in HELLO], [1]
    with pytest.raises(ChatTemplateError, match="unsafe"):
        render(change, messages, tools=tools)
    assert (messages, tools) == (HELLO, [1])


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% endfor %}", "{{ x | nosuchfilter }}", "{% include 'x' "])
def test_a_broken_template_is_refused_when_it_is_read(source):
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        ChatTemplate(source, bos_token="", eos_token="")


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages[0]['content'] + 1 }}", "{{ a.b.c }}", "{% include 'x' %}"]
)
def test_a_template_that_fails_is_one_error(source):
    with pytest.raises(ChatTemplateError, match="the chat template failed"):
        render(source)


def test_a_template_could_write_without_end():
    million = "x" * 10**6
    endless = "{% for i in range(99999) %}{% for k in range(99999) %}{{ million }}{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=f"^the chat template failed: it writes more than {64 * 2**20} char"):
        render(endless, million=million)
    assert render("{% for i in range(60) %}{{ million }}{% endfor %}", million=million) == 60 * million


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hello", "messages must be a list of dicts, not str"),
        ({"role": "user"}, "messages must be a list of dicts, not dict"),
        (iter(HELLO), "messages must be a list of dicts, not list_iterator"),
        ([], "messages is empty"),
        (["hi"], "messages[0] must be a dict, not str"),
        ([*HELLO, {"content": "x"}], "messages[1]['role'] must be a string such as 'user', not None"),
        ([{"role": "", "content": "x"}], "messages[0]['role'] must be a string such as 'user', not ''"),
        ([{"role": 3, "content": "x"}], "messages[0]['role'] must be a string such as 'user', not 3"),
        ([{"role": "user"}], "messages[0]['content'] must be a string or a list of parts, not NoneType"),
        ([{"role": "user", "content": 5}], "messages[0]['content'] must be a string or a list of parts, not int"),
    ],
)
def test_a_malformed_message_is_named(messages, complaint):
    with pytest.raises(ChatTemplateError, match=re.escape(complaint)):
        render(CHATML, messages)


def test_calls_of_tools_need_no_content_and_parts_are_content():
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    source = "{{ messages[0].tool_calls[0].name }}{{ messages[1].content[0].text }}"
    assert render(source, [calls, parts]) == "fhi"


def test_equal_sources_are_compiled_once():
    one, other = (ChatTemplate(CHATML, bos_token=bos, eos_token="") for bos in "ab")
    assert one._template is other._template
    assert (one.bos_token, other.bos_token, one.source) == ("a", "b", CHATML)
