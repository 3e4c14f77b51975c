"""Servers that several test files share: starting one takes three seconds of processor time."""

from itertools import pairwise

import pytest
import tokenizers

from laneformer import infer
from tests.support.checkpoints import CHATML, HARMONY, HARMONY_TEMPLATE, follow, save_checkpoint
from tests.support.serve_cases import BACKEND, Server
from tests.support.serving.tool_model import tool_model


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory):
    """A random model with a tokenizer that has the tokens of the default chat template."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", *CHATML)


@pytest.fixture(scope="session")
def small_server(small_checkpoint):
    """A server for one request at a time, while two more may wait."""
    options = ("--backend", BACKEND, "--parallel", 1, "--max-waiting", 2, "--allowed-host", "my.example")
    server = Server(small_checkpoint, *options)
    yield server.wait_until(200)
    server.kill()


@pytest.fixture(scope="session")
def small_engine(small_checkpoint):
    """An engine with the model of `small_server`."""
    return infer.Engine.load(small_checkpoint, BACKEND)


@pytest.fixture(scope="session")
def tool_checkpoint(tmp_path_factory):
    """The model of tests/support/serving/tool_model.py, which calls a tool."""
    return tool_model(tmp_path_factory.mktemp("checkpoints") / "tools")


@pytest.fixture(scope="session")
def tool_server(tool_checkpoint):
    server = Server(tool_checkpoint, "--backend", BACKEND, "--any-model-name")
    yield server.wait_until(200)
    server.kill()


@pytest.fixture(scope="session")
def thinking_server(tmp_path_factory):
    """A server whose model repeats the reasoning "Why" and the answer "Why". It answers to any name, keeps no prefixes,
    and has a template that is not the folder's: it ends prompts in the header of reasoning, or with `bare` = true it
    writes only the first message and some variables.
    """
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "harmony", *HARMONY, lanes=1, layers=1)
    start = "'<|start|>assistant"
    template = HARMONY_TEMPLATE.replace(f"{start}' }}", f"{start}<|channel|>analysis<|message|>' }}")
    bare = "{{ messages[0].content }}{% if thinking %}!{% endif %}{{ reasoning_effort }}"
    file = folder.with_suffix(".jinja")
    file.write_text(f"{{% if bare %}}{bare}{{% else %}}{template}{{% endif %}}")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('the template of the folder is used') }}")
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    said = ids("<|message|>Why<|end|><|channel|>final<|message|>").ids
    follow(folder, dict(pairwise(said)))
    options = ("--any-model-name", "--chat-template", file, "--no-prefix-cache")
    server = Server(folder, "--backend", BACKEND, *options)
    yield server.wait_until(200)
    server.kill()
