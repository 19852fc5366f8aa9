"""Chat templates render as the reference does; what a hostile one does, it does not do for long."""

import asyncio
import subprocess
import time

import pytest
import uvloop
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.errors import DeadlineExceeded, TemplateFailed
from penstock.server.chat_template import LONG_CHARACTERS, ChatTemplate
from penstock.server.claim import Claim
from tests.fakes.tiny_tokenizer import TEMPLATE
from tests.unit.server.conftest import all_threads_taken

MESSAGES = [
    {"role": "system", "content": "be <brief> & kind"},
    {"role": "user", "content": "  Grüß Gott 🙂\n"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "b"},
]

LIKE_CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LIKE_LLAMA = """{{ bos_token }}
{% set ns = namespace(system='') %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% set ns.system = message.content %}
        {% continue %}
    {% endif %}
    {% generation %}
[{{ loop.index0 }}:{{ message.role | upper }}] {{ message.content.strip() }}{{ eos_token }}
    {% endgeneration %}
{% endfor %}
{{ {'system': ns.system, 'umlaut': 'ü', 'html': '<&>'} | tojson }}
{{ [1, 2] | tojson(indent=2) }}
{% if tools is not none %}tools{% endif %}
"""


@pytest.fixture
async def make():
    made = []

    def make_template(text, **limits):
        made.append(ChatTemplate(text, bos_token="<s>", eos_token="</s>", **limits))
        return made[-1]

    yield make_template
    for template in made:
        await template.close()


@pytest.mark.parametrize("text", [TEMPLATE, LIKE_CHATML, LIKE_LLAMA])
async def test_a_template_renders_as_the_reference_does(make, text):
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=text, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert await make(text).render(MESSAGES) == expected


async def test_the_date_is_there_for_templates_that_ask(make):
    assert len(await make("{{ strftime_now('%Y-%m-%d') }}").render(MESSAGES)) == 10


async def test_a_template_may_refuse_messages(make):
    template = make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        await template.render(MESSAGES)
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        await template.render(MESSAGES)


async def test_a_long_conversation_waits_for_no_other_work_in_threads(make):
    with all_threads_taken():
        text = "x" * LONG_CHARACTERS
        assert await make("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


@pytest.mark.parametrize("text", ["{% for %}", "{{ 1 / 0 }}", "{{ messages[99].content.x }}", "{{ 'a' + 1 }}"])
async def test_a_broken_template_says_that_it_is(make, text):
    with pytest.raises(TemplateFailed, match="chat template failed"):
        await make(text).render(MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (messages | length) ** 999999999 }}",  # one call, which no signal handler of Python's can interrupt
    ],
)
async def test_a_template_that_does_not_end_is_ended(make, text):
    with pytest.raises(TemplateFailed, match=r"longer than 0\.5 s"):
        await make(text, render_seconds=0.5).render(MESSAGES)


async def test_a_template_that_does_not_compile_in_time_is_ended(make):
    with pytest.raises(TemplateFailed, match=r"took longer than 1\.1 s"):
        await make("{{ 9 ** 999999999 }}", render_seconds=0.1).render(MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ '%9999999999d' % 1 }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 'a' | center(10 ** 10) }}",
    ],
)
async def test_a_template_cannot_fill_the_memory(make, text):
    with pytest.raises(TemplateFailed):
        await make(text).render(MESSAGES)


async def test_a_template_too_deep_to_compile_says_so(make):
    with pytest.raises(TemplateFailed, match="failed: it is nested too deeply"):
        await make("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}").start()


async def test_half_a_surrogate_pair_is_no_broken_limit(make):
    template = make("{% if messages[0].content == 'half' %}{{ '\\ud800' }}{% endif %}ok")
    with pytest.raises(TemplateFailed, match="it wrote half of a surrogate pair"):
        await template.render([{"role": "user", "content": "half"}])
    assert await template.render(MESSAGES) == "ok"


async def test_a_template_that_makes_no_prompt_is_told(make):
    with pytest.raises(TemplateFailed, match="it made an empty prompt of these messages"):
        await make("{# nothing #}").render(MESSAGES)


async def test_the_process_is_killed_without_being_reaped_behind_the_back_of_the_loop(make, monkeypatch):
    """What polls for it while the loop waits for it makes the loop report a stranger on standard error."""
    template = make("ok")
    await template.start()
    monkeypatch.delattr(subprocess.Popen, "poll")
    await template.close()


async def test_a_prompt_has_a_longest_length(make):
    template = make("{% for i in range(200) %}{{ 'x' * 10 }}{% endfor %}", max_characters=1000)
    with pytest.raises(TemplateFailed, match="longer than 1000 characters"):
        await template.render(MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
    ],
)
async def test_a_template_stays_in_its_sandbox(make, text):
    try:
        seen = await make(text).render(MESSAGES)
    except TemplateFailed:
        seen = ""
    assert seen == ""


async def test_after_a_kill_the_next_prompt_is_rendered(make):
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    text = "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}ok"
    template = make(text, render_seconds=2.0)
    with pytest.raises(TemplateFailed):
        await template.render([{"role": "user", "content": "loop"}])
    assert await template.render([{"role": "user", "content": "go"}]) == "ok"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_process_that_died_while_idle_is_replaced_and_the_prompt_is_rendered(monkeypatch, new_loop):
    processes = []
    start = asyncio.create_subprocess_exec

    async def noting_start(*arguments, **options):
        processes.append(await start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noting_start)

    async def render_around_a_death() -> list[str]:
        template = ChatTemplate("{{ messages[0].content }}")
        texts = [await template.render([{"role": "user", "content": "before"}])]
        processes[0].kill()
        await processes[0].wait()
        texts.append(await template.render([{"role": "user", "content": "after"}]))
        await template.close()
        return texts

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(render_around_a_death()) == ["before", "after"]
    assert len(processes) == 2


async def test_a_caller_who_gives_up_does_not_get_the_next_ones_prompt(make):
    template = make("{{ messages[0].content }}")
    first = asyncio.create_task(template.render([{"role": "user", "content": "first"}]))
    await asyncio.sleep(0)
    first.cancel()
    assert await template.render([{"role": "user", "content": "second"}]) == "second"


SLOW_WHEN_LONG = (
    "{% if messages | length > 1000 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}done"
)


async def test_a_short_conversation_does_not_wait_for_a_long_one(make):
    template = make(SLOW_WHEN_LONG, render_seconds=1.0)
    await template.start()
    message = {"role": "user", "content": ""}
    long = asyncio.create_task(template.render([message] * 1001))
    await asyncio.sleep(0)
    assert await template.render([message]) == "done"
    assert not long.done()
    with pytest.raises(TemplateFailed):
        await long


async def test_all_texts_of_a_message_count_for_how_long_a_conversation_is(make):
    template = make(SLOW_WHEN_LONG.replace("messages |", "messages[0].name |"), render_seconds=1.0)
    await template.start()
    long = asyncio.create_task(template.render([{"role": "user", "content": "", "name": "n" * LONG_CHARACTERS}]))
    await asyncio.sleep(0)
    assert await template.render([{"role": "user", "content": ""}]) == "done"
    assert not long.done()
    with pytest.raises(TemplateFailed):
        await long


async def test_a_deadline_ends_the_wait_for_a_template(make):
    template = make(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", render_seconds=1.0
    )
    message = [{"role": "user", "content": "x"}]
    first = asyncio.create_task(template.render(message, Claim("alice")))
    for claim in (Claim("alice", deadline=time.monotonic() + 0.05), Claim("bob", deadline=time.monotonic() + 0.05)):
        with pytest.raises(DeadlineExceeded):
            await template.render(message, claim)
    assert not first.done()
    with pytest.raises(TemplateFailed):
        await first


async def test_many_at_once_each_get_their_own(make):
    template = make("{{ messages[0].content }}")
    prompts = [template.render([{"role": "user", "content": f"number {number}"}]) for number in range(20)]
    assert await asyncio.gather(*prompts) == [f"number {number}" for number in range(20)]


async def test_a_developer_is_a_system_to_templates_that_know_none(make):
    message = [{"role": "developer", "content": "x"}]
    assert await make("{{ messages[0].role }}").render(message) == "system"
    knowing = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert await make(knowing).render(message) == "yes"
