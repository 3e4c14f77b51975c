"""Reads and checks requests in OpenAI's form. A supported parameter is obeyed. An unsupported one is refused if the
answer would depend on it; otherwise the answer's warnings name it.
"""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from laneformer.infer.serve.body import ApiError, printable, shown, wrong
from laneformer.infer.serve.grammars import read_grammar
from laneformer.infer.serve.tools import read_calls, read_tools
from laneformer.infer.text.grammar import Grammar
from laneformer.infer.text.tool_calls import ToolRequest

COMPLETION_TOKENS = 16  # OpenAI's default for a completion; a chat may fill the context
LIMITS = ("max_tokens", "max_completion_tokens")  # two names of one parameter
MOST_TOP_LOGPROBS = 20
WANTED = {bool: "true or false", str: "a string", int: "a whole number", float: "a number", dict: "an object"}
MOST_CHOICES = 32
MOST_STOPS, LONGEST_STOP = 16, 256  # limited because the text of each token is compared with all stops
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "top_n_sigma": float,
    "repetition_penalty": float,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
}
BIAS = "logit_bias"  # also a field of infer.Sampling
MOST_BIASES = 1024
# Unsupported parameters that would change the answer, with the values that change nothing.
ABSENT: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "background": (False,),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    # vLLM and SGLang
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "no_stop_trim": (False,),
    "parse_tool_calls": (True,),
    "prompt_logprobs": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (False,),
    "skip_special_tokens": (True,),
    "stop_regex": ([],),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # llama.cpp
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_indent": (0,),
    "n_probs": (0,),
    "reasoning_budget": (-1,),
    "reasoning_format": ("none", "auto"),
    "reasoning_in_content": (False,),
    "return_tokens": (False,),
    "repeat_penalty": (1,),
    "samplers": (),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # other servers and routers
    "enable_search": (False,),
    "format": ("",),
    "images": ([],),
    "options": ({},),
    "raw": (False,),
    "safe_prompt": (False,),
    "search_parameters": ({}, {"mode": "off"}),
    "think": (False,),
    "thinking": ({"type": "disabled"},),
    "thinking_budget": (),
    "top_a": (0,),
    "transforms": ([],),
}
# Parameters that no answer depends on, because they concern storage, accounting, caches, the queue, or a feature that
# is off. Each has the values for which this is true, None for all values.
WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("metadata", "prompt_cache_retention", "service_tier", "store", "verbosity")),
    "web_search_options": ({},),
    **dict.fromkeys(("data_parallel_rank", "guided_decoding_backend", "guided_whitespace_pattern")),
    **dict.fromkeys(("kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "priority", "request_id", "rid")),
    **dict.fromkeys(("session_params", "spaces_between_special_tokens", "stream_reasoning", "vllm_xargs")),
    **dict.fromkeys(("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers")),
    **dict.fromkeys(("dynatemp_exponent", "id_slot", "mirostat_eta", "mirostat_tau", "n_discard", "n_keep")),
    **dict.fromkeys(("post_sampling_probs", "repeat_last_n", "return_progress", "slot_id", "timings_per_token")),
    **dict.fromkeys(("speculative.n_min", "speculative.p_min")),
    "xtc_threshold": None,
    **dict.fromkeys(("caching", "chat_id", "debug", "draft_model", "keep_alive", "models", "plugins", "provider")),
    **dict.fromkeys(("route", "session_id", "trace", "ttl", "usage")),
    **dict.fromkeys(("incremental_output", "prompt_cache_options", "tool_stream", "vl_high_resolution_images")),
}
LABELS = ("user", "safety_identifier")  # identify the user; any string, without effect
MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}  # templates read these
DRAFT_MAX = "speculative.n_max"  # llama.cpp's name; the period is part of it
EFFORT = "reasoning_effort"  # a parameter, and a variable of some templates
TEMPLATE_FIELDS = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now"}  # not set by requests
THINKING = "enable_thinking"  # a parameter, and a variable of some templates
VARIABLES = {EFFORT: str, THINKING: bool}  # all parameters that are variables of templates
# In a message, another name of reasoning_content; as a parameter, the object that contains the effort.
REASONING = "reasoning"
# Fields of messages, and of `reasoning`, that nothing depends on.
MESSAGE_LABELS = {"annotations", "cache_control", "id", "metadata", "parsed", "phase", "provider_specific_fields",
                  "reasoning_details", "refusal", "thinking_blocks", "timestamp"}  # fmt: skip
REASONING_LABELS = {"exclude", "generate_summary", "summary"}


@dataclass(frozen=True)
class Call:
    """A checked request for a completion or a chat completion."""

    chat: bool
    prompt: str | list[int] | list[dict[str, Any]]
    """Text or token ids for a completion; messages for a chat."""
    tools: ToolRequest | None
    """The functions that the answer may call; None if it may not call any."""
    n: int
    """Number of answers."""
    model: str | None
    max_tokens: int | None
    sampling: dict[str, Any]
    """Fields of infer.Sampling. Defaults are the model's own, otherwise OpenAI's: temperature 1 and a random seed."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    """Stop tokens besides the model's."""
    ignore_eos: bool
    logprobs: int | None
    """Number of most likely tokens to report at each position; None for no log-probabilities at all."""
    return_token_ids: bool
    return_timeline: bool
    """Whether to report the text and time of each token."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    template_values: dict[str, Any]
    """Variables of the chat template besides the messages."""
    cache_prompt: bool
    """Whether to reuse a kept prefix for this prompt, and to keep this prompt for later requests."""
    cache_salt: str
    """Prefixes are shared only among requests with equal salts."""
    cache_key: str
    """Name of the conversation, whose own prefix is preferred among prefixes of equal length."""
    prediction: str
    """A text to draft from; "" for none."""
    draft_max: int | None
    """Limit on the drafts of a pass, if lower than the engine's."""
    grammar: Grammar | None
    """Grammar of the answer's content."""
    token_healing: bool
    """Whether the first tokens of a completion may replace the last ones of the prompt."""
    warnings: tuple[str, ...]
    """Warnings, one line each, for example about parameters without effect."""

    def warned(self, *names: str) -> "Call":
        """The same request with a warning that these parameters have no effect."""
        return self.noted(*(f"{name} has no effect" for name in names))

    def noted(self, *lines: str) -> "Call":
        """The same request with these lines among its warnings."""
        return replace(self, warnings=(*self.warnings, *lines))

    def without_effect(self, template_variables: Collection[str], drafts: bool) -> list[str]:
        """Names of the parameters that the chat template does not read, and of those about drafts if the engine makes
        none. template_variables: names that the template reads. drafts: whether the engine makes drafts.
        """
        unread = [name for name in self.template_values if not self.chat or name not in template_variables]
        of_template = [name if name in VARIABLES else f"chat_template_kwargs.{printable(name)}" for name in unread]
        about_drafts = {"prediction": self.prediction, DRAFT_MAX: self.draft_max}
        return of_template + [name for name, value in about_drafts.items() if value and not drafts]

    @property
    def prompt_param(self) -> str:
        """The name of the parameter that holds the prompt."""
        return "messages" if self.chat else "prompt"


def read_call(fields: dict[str, Any], chat: bool, recommended: Mapping[str, Any] | None = None) -> Call:
    """The request in the fields of a body. Raises ApiError with the name of the parameter.

    recommended: the model's own sampling settings, for those that the body does not have.
    """
    left = {name: value for name, value in fields.items() if value is not None}
    ignored: list[str] = []
    prompt = _messages(left, ignored) if chat else _prompt(left)
    stream = _take(left, "stream", bool, False)
    usage, continuous = _stream_options(left, stream, ignored)
    given = {name: value for name, kind in SAMPLING.items() if (value := _take(left, name, kind)) is not None}
    given |= _logit_bias(left)
    for name in ("top_k", "top_n_sigma"):
        if given.get(name) == -1:  # vLLM's and llama.cpp's value for all tokens
            given[name] = 0
    template_values = _template_values(left, ignored)
    call = Call(
        chat=chat,
        prompt=prompt,
        tools=read_tools(left, ignored) if chat else None,
        n=_count(left, "n", None, 1, MOST_CHOICES) or 1,
        model=_take(left, "model", str),
        max_tokens=_max_tokens(left, None if chat else COMPLETION_TOKENS),
        sampling={"temperature": 1.0, "seed": secrets.randbits(53), **(recommended or {}), **given},
        stop=_stop(left),
        stop_token_ids=_stop_token_ids(left),
        ignore_eos=_take(left, "ignore_eos", bool, False),
        logprobs=_chat_logprobs(left) if chat else _completion_logprobs(left),
        return_token_ids=_take(left, "return_token_ids", bool, False),
        return_timeline=_take(left, "return_timeline", bool, False),
        stream=stream,
        include_usage=usage,
        continuous_usage=continuous,
        template_values=template_values,
        cache_prompt=_take(left, "cache_prompt", bool, True),
        cache_salt=_take(left, "cache_salt", str, ""),
        cache_key=_take(left, "prompt_cache_key", str, ""),
        prediction=_prediction(left),
        draft_max=_count(left, DRAFT_MAX, None, 0),
        grammar=read_grammar(left),
        token_healing=not chat and _take(left, "token_healing", bool, False),
        warnings=(),
    )
    for name in LABELS:
        _take(left, name, str)
    for name, value in left.items():
        if value in ABSENT.get(name, ()):
            continue
        if name in WITHOUT_EFFECT and ((without := WITHOUT_EFFECT[name]) is None or value in without):
            ignored.append(name)
        elif name in ABSENT:
            raise ApiError(
                400,
                f"{name} = {shown(value)} is not supported: leave {name} out",
                param=name,
                code="unsupported_parameter",
            )
        else:
            spelled = printable(name)
            raise ApiError(400, f"unknown parameter {spelled}", param=spelled, code="unknown_parameter")
    return call.warned(*ignored)


def _take(left: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Removes a parameter from the fields and returns its value. Raises ApiError for a value of another type."""
    value = left.pop(name, default)
    if value is default:
        return value
    right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not right:
        raise wrong(name, value, WANTED[kind])
    return value


def _count(left: dict[str, Any], name: str, default: int | None, least: int, most: int | None = None) -> int | None:
    value = _take(left, name, int, default)
    if value is not None and (value < least or (most is not None and value > most)):
        raise wrong(
            name,
            value,
            f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}",
        )
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _prompt(left: dict[str, Any]) -> str | list[int]:
    prompt = left.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and (isinstance(prompt[0], str) or _is_ids(prompt[0])):
        [prompt] = prompt
    if isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt):
        raise ApiError(
            400,
            "several prompts in one request are not supported: send one request per prompt",
            param="prompt",
            code="unsupported_parameter",
        )
    if not isinstance(prompt, str) and not _is_ids(prompt):
        raise wrong("prompt", prompt, "a string, or a list of token ids")
    return prompt


def _messages(left: dict[str, Any], ignored: list[str]) -> list[dict[str, Any]]:
    """The messages in the form that templates expect: without null fields, and with the text parts of a content joined.
    Adds the names of fields without effect to `ignored`.
    """
    messages = left.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of at least one message")
    made = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(f"messages[{i}]", message, "an object with a role and content")
        kept = {name: value for name, value in message.items() if value is not None and value != []}
        if isinstance(kept.get(REASONING), str):
            kept.setdefault("reasoning_content", kept.pop(REASONING))
        for name in [name for name in kept if name not in MESSAGE_FIELDS]:
            path = f"messages[{i}].{printable(name)}"
            if name not in MESSAGE_LABELS:
                raise ApiError(400, f"{path} is not supported: leave it out", param=path, code="unsupported_parameter")
            ignored.append(path)
            del kept[name]
        if "tool_calls" in kept:
            kept["tool_calls"] = read_calls(kept["tool_calls"], f"messages[{i}].tool_calls", ignored)
        if "content" in kept:
            kept["content"] = _content(kept["content"], f"messages[{i}].content")
        elif "tool_calls" not in kept:
            raise wrong(f"messages[{i}].content", message.get("content"), "a string")
        made.append(kept)
    return made


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]
    if len(texts) != len(parts):
        raise wrong(name, content, 'a string, or parts {"type": "text", "text": ...}; other parts are not supported')
    return "\n".join(texts)


def _prediction(left: dict[str, Any]) -> str:
    """The text of OpenAI's `prediction`; "" without it."""
    given = _take(left, "prediction", dict, {})
    prediction = {f"prediction.{name}": value for name, value in given.items() if value is not None}
    if given and (kind := prediction.pop("prediction.type", None)) != "content":
        raise wrong("prediction.type", kind, '"content"')
    text = _content(prediction.pop("prediction.content", None), "prediction.content") if given else ""
    for name in map(printable, prediction):
        raise ApiError(400, f"unknown parameter {name}", param=name, code="unknown_parameter")
    return text


def _template_values(left: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """Variables for the chat template, from `chat_template_kwargs` and from the parameters in VARIABLES."""
    values = _take(left, "chat_template_kwargs", dict, {})
    for name in TEMPLATE_FIELDS & values.keys():
        path = f"chat_template_kwargs.{name}"
        raise ApiError(400, f"{path} is not supported: leave it out", param=path, code="unsupported_parameter")
    given = {name: value for name, kind in VARIABLES.items() if (value := _take(left, name, kind)) is not None}
    reasoning = {f"{REASONING}.{name}": value for name, value in _take(left, REASONING, dict, {}).items()}
    reasoning = {path: value for path, value in reasoning.items() if value is not None}
    if (effort := _take(reasoning, "reasoning.effort", str)) is not None:
        given.setdefault(EFFORT, effort)
    if _take(reasoning, "reasoning.enabled", bool, False) and effort is None:
        raise ApiError(400, "reasoning.enabled = true needs reasoning.effort", param="reasoning.enabled")
    for path in map(printable, reasoning):
        if path.removeprefix(f"{REASONING}.") not in REASONING_LABELS:
            raise ApiError(400, f"{path} is not supported: leave it out", param=path, code="unsupported_parameter")
        ignored.append(path)
    if given.get(EFFORT) == "none":
        del given[EFFORT]
        given.setdefault(THINKING, False)
    return {**given, **values}


def _max_tokens(left: dict[str, Any], default: int | None) -> int | None:
    """Limit on the tokens of the answer; None to fill the context, which is -1 in a request."""
    given = {name: value for name in LIMITS if (value := _take(left, name, int)) is not None}
    for name, value in given.items():
        if value < 1 and value != -1:
            raise wrong(name, value, "a whole number of at least 1, or -1 to fill the context")
    if len({*given.values()}) > 1:
        both = " and ".join(f"{name} = {value}" for name, value in given.items())
        raise ApiError(400, f"{both} mean the same: give only one", param="max_tokens")
    limit = next(iter(given.values()), default)
    return None if limit == -1 else limit


def _stop(left: dict[str, Any]) -> tuple[str, ...]:
    stop = left.pop("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stop, list)
        or len(stop) > MOST_STOPS
        or not all(isinstance(s, str) and 1 <= len(s) <= LONGEST_STOP for s in stop)
    ):
        raise wrong("stop", stop, f"a string of 1 to {LONGEST_STOP} characters, or a list of up to {MOST_STOPS}")
    return tuple(stop)


def _logit_bias(left: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """The field logit_bias of infer.Sampling, with pairs of token id and bias; {} without it. In a request it is an
    object whose names are token ids.
    """
    given = _take(left, BIAS, dict, {})
    if len(given) > MOST_BIASES:
        raise ApiError(400, f"{BIAS} has {len(given)} entries: give at most {MOST_BIASES}", param=BIAS)
    pairs = []
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise ApiError(400, f"{BIAS} = {shown(name)}: give token ids as names", param=BIAS)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ApiError(400, f"{BIAS}[{name}] = {shown(bias)}: give a number from -100 to 100", param=BIAS)
        pairs.append((int(name), bias))
    return {BIAS: pairs} if pairs else {}


def _stop_token_ids(left: dict[str, Any]) -> tuple[int, ...]:
    ids = left.pop("stop_token_ids", [])
    if not _is_ids(ids) or len(ids) > MOST_STOPS:
        raise wrong("stop_token_ids", ids, f"a list of up to {MOST_STOPS} token ids")
    return tuple(ids)


def _chat_logprobs(left: dict[str, Any]) -> int | None:
    wanted, top = _take(left, "logprobs", bool, False), _count(left, "top_logprobs", None, 0, MOST_TOP_LOGPROBS)
    if top and not wanted:
        raise ApiError(400, f"top_logprobs = {top} needs logprobs = true", param="top_logprobs")
    return (top or 0) if wanted else None


def _completion_logprobs(left: dict[str, Any]) -> int | None:
    for name, absent in (("logprobs", False), ("top_logprobs", 0)):  # the values of a chat for no log-probabilities
        if left.get(name) is absent:
            del left[name]
    return _count(left, "logprobs", None, 0, MOST_TOP_LOGPROBS)


def _stream_options(left: dict[str, Any], stream: bool, ignored: list[str]) -> tuple[bool, bool]:
    """Whether to report usage at the end, and whether with each event. Without a stream the options have no effect."""
    options = _take(left, "stream_options", dict, {})
    if options and not stream:
        ignored.append("stream_options")
        return False, False
    options = {f"stream_options.{name}": value for name, value in options.items() if value is not None}
    usage = _take(options, "stream_options.include_usage", bool, False)
    continuous = _take(options, "stream_options.continuous_usage_stats", bool, False)
    if options.pop("stream_options.include_obfuscation", False) is not False:
        ignored.append("stream_options.include_obfuscation")
    for name in map(printable, options):
        raise ApiError(400, f"unknown parameter {name}", param=name, code="unknown_parameter")
    return usage, continuous
