"""Encoders: hostile templates, tokenizers and prompts cost their own request only, within limits."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from laneformer.errors import CheckpointError, InputError
from laneformer.infer.serve.processes import encoders as module
from laneformer.infer.serve.processes.encoders import Encoder, EncoderError, Encoders, Folder, TooLong
from laneformer.infer.text.chat_template import ChatTemplate
from laneformer.infer.text.conversation import encode
from laneformer.infer.text.tokenizer import Tokenizer
from tests.support.checkpoints import byte_tokenizer
from tests.support.paths import PYTHON, ROOT

TEMPLATE = """\
{% set case = messages[-1].content %}
{% if case == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% elif case == 'times' %}{{ case * 300000000 }}
{% elif case == 'center' %}{{ case.center(2000000000) }}
{% elif case == 'indent' %}{{ (case.replace('indent', '\\n') * 20000) | indent(200000) }}
{% elif case == 'tojson' %}{{ messages | tojson(indent=1000000000) }}
{% elif case == 'joined' %}{{ range(99999) | join(case * 99999) }}
{% elif case == 'format' %}{{ ('%0' + '9' * 9 + 'd') % messages | length }}
{% elif case == 'power' %}{{ (9 ** (messages | length + 999999999)) is odd }}
{% elif case == 'macro' %}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
{% elif case == 'error' %}{{ raise_exception(case * 10000000) }}
{% elif case == 'long' %}{{ case * 20000000 }}
{% else %}{{ strftime_now('%Y')[:0] }}{% for m in messages %}{{ m.role + m.content | tojson }}<|im_end|>{% endfor %}
{% endif %}"""
NAMES = ("<|im_start|>", "<|im_end|>")
CONTEXT = 1000


def folder(path: Path, template: str | None = TEMPLATE, **changes) -> Folder:
    """A folder with a tokenizer of bytes. changes: parts of its tokenizer.json."""
    path.mkdir()
    made = json.loads(byte_tokenizer(*NAMES).to_str())
    (path / "tokenizer.json").write_text(json.dumps(made | changes))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return Folder(path, 7, None, (3,), CONTEXT)


def read(folder: Folder) -> tuple[Encoders, module.Facts]:
    made = Encoders()
    made.read(folder)
    return made, made.facts()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("encoders") / "hostile")


@pytest.fixture(scope="module")
def encoders(hostile):
    made, facts = read(hostile)
    assert facts.no_chat is None and "strftime_now" in facts.names and 3 in facts.ends
    yield made
    made.close()


@pytest.fixture
def encoder(encoders):
    made = Encoder(encoders)
    yield made
    made.close()


def chat(encoder, content, tools=None):
    return encoder.chat([{"role": "user", "content": content}], tools, {})


def test_prompts_are_encoded_as_in_this_process(encoder, hostile):
    tokenizer = Tokenizer(hostile.tokenizer / "tokenizer.json", hostile.begin)
    messages = [{"role": "user", "content": "a <|im_end|> é"}, {"role": "assistant", "content": "b"}]
    template = ChatTemplate.load(hostile.tokenizer)
    assert encoder.text("héllo") == tokenizer.encode("héllo") and encoder.text("héllo")[0] == 7
    assert encoder.prediction("héllo") == tokenizer.encode("héllo")[1:]
    assert len(encoder.prediction("a" * 5000)) == CONTEXT
    assert encoder.chat(messages, None, {}) == encode(template, messages, None, {})


@pytest.mark.parametrize("case", ["times", "center", "indent", "format", "macro", "error", "long", "tojson", "joined"])
def test_costly_template_is_refused(encoder, case):
    with pytest.raises((InputError, EncoderError)) as caught:
        chat(encoder, case)
    assert len(str(caught.value)) < 3000
    assert chat(encoder, "a"), "the next prompt is encoded"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["loop", "power"])
def test_endless_template_is_ended(encoder, case):
    began = time.process_time()
    with pytest.raises(InputError, match=r"within 5 s of processor time"):
        chat(encoder, case)
    assert chat(encoder, "a") and time.process_time() - began < 2


def test_too_long_prompts_are_refused_before_they_are_encoded(encoder):
    for size in (CONTEXT, 1 << 20):
        with pytest.raises(TooLong, match=f"has .*tokens and the context {CONTEXT}: shorten"):
            encoder.text("a" * size)
        with pytest.raises(TooLong):
            chat(encoder, "a" * size)
    with pytest.raises(TooLong, match="at least"):
        encoder.text("a" * (1 << 20))
    assert len(encoder.text("a" * (CONTEXT - 2))) == CONTEXT - 1


def test_work_for_a_client_that_has_left_ends(encoder):
    threading.Timer(0.2, encoder.stop).start()
    began = time.perf_counter()
    with pytest.raises(InputError):
        chat(encoder, "loop")
    encoder.renew()
    assert time.perf_counter() - began < module.CPU_SECONDS and chat(encoder, "a")


def test_killed_encoder_is_replaced(encoder):
    os.kill(encoder._number, signal.SIGKILL)
    with pytest.raises(InputError):
        encoder.text("a")
    assert encoder.text("a")[0] == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 30000000000 }}{{ messages }}", "memory"),
        ("{{ 'x'.center(messages | length + 20000000000) }}", "memory"),
        ("{% for m in messages %}", "is not a chat template"),
    ],
)
def test_template_that_cannot_be_loaded_leaves_completions(tmp_path, template, message):
    made, facts = read(folder(tmp_path / "model", template))
    assert message in facts.no_chat and facts.no_chat.count("\n") == 0
    assert Encoder(made).text("a")[0] == 7
    made.close()


@pytest.mark.slow
def test_endless_template_at_load_leaves_completions(tmp_path):
    made, facts = read(folder(tmp_path / "model", "{{ (9 ** 999999999) is odd }}{{ messages }}"))
    assert "processor time" in facts.no_chat
    made.close()


def test_tokenizer_that_panics_is_refused_in_one_line(tmp_path):
    panics = {"type": "FixedLength", "length": 0}
    with pytest.raises(CheckpointError, match=r"^the tokenizer.json cannot be used \(PanicException: [^\n]*$"):
        read(folder(tmp_path / "model", pre_tokenizer=panics))


def test_encoders_import_no_jax():
    """It would cost 150 MB and make a fork ten times as slow."""
    lines = (
        "import sys",
        "from laneformer.infer.serve.processes import encoders",
        "from laneformer.infer.text import chat_template, conversation, tokenizer",
    )
    program = "\n".join((*lines, "assert 'jax' not in sys.modules"))
    subprocess.run([*PYTHON, "-c", program], cwd=ROOT, check=True)
