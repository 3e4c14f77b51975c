"""Chat templates with calls of tools, each as short as its format allows, and calls as models write them."""

import json

from laneformer.infer.text.channels import Part

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
TAIL = """{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DEFINED = "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>\\n' }}"
CONTENT = "{{ m.content }}{% for c in m.tool_calls or [] %}"
TEMPLATES = {
    "harmony": """{% if tools %}{{ 'namespace functions {' }}{% for t in tools %}{{ t.function.name + ' ' }}{% endfor %}
{{- '}' }}{% endif %}{% for m in messages %}
{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
{%- if m.tool_calls %}{{ (m.thinking or m.content) }}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + m.tool_calls[0].function.name
 + '<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    "hermes": DEFINED
    + """{{ '<tool_call>{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}</tool_call>\\n' }}"""
    + "{% endif %}"
    + HEAD
    + CONTENT
    + """{{ '<tool_call>' }}{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"""
    + """{{ '</tool_call>' }}{% endfor %}"""
    + TAIL,
    "qwen3-coder": DEFINED
    + "{{ '<tool_call>\\n<function=NAME>\\n<parameter=NAME>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}"
    + "{% endif %}"
    + HEAD
    + CONTENT
    + "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}{% for k, v in c.function.arguments | items %}"
    + "{{ '<parameter=' + k + '>\\n' }}{{ v }}{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
    + "{% endfor %}"
    + TAIL,
    "mistral": "{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}" + HEAD + "{{ m.content }}{{ '[TOOL_CALLS]' }}" + TAIL,
    "mistral-args": "{{ tools | tojson }}" + HEAD + "{{ m.content }}{{ '[TOOL_CALLS]' }}f{{ '[ARGS]' }}" + TAIL,
    "llama3": DEFINED
    + """{{ 'Respond in the format {"name": function name, "parameters": dictionary}' }}{% endif %}"""
    + "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content }}{% endfor %}",
}


def function(name, **properties):
    """Definition of a function as a tool. properties: JSON schemas of its arguments, which are all required."""
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": f"to {name}", "parameters": schema}}


WEATHER = function("get_weather", city={"type": "string"})


def written(name, calls):
    """Text of an answer that makes these calls (name, arguments) in the format `name`."""
    if name == "qwen3-coder":
        return "\n".join(
            f"<tool_call>\n<function={function}>\n"
            + "".join(
                f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            + "</function>\n</tool_call>"
            for function, arguments in calls
        )
    if name == "mistral-args":
        return "".join(f"[TOOL_CALLS]{function}[ARGS]{json.dumps(arguments)}" for function, arguments in calls)
    key = "parameters" if name == "llama3" else "arguments"
    objects = [json.dumps({"name": function, key: arguments}, ensure_ascii=False) for function, arguments in calls]
    if name == "llama3":
        return "; ".join(objects)
    if name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def calls_of(reader, pieces):
    """Content and calls that a reader finds in an answer without channels. pieces: the answer's text as it arrives."""
    text, calls = "", []
    for read in (*(reader.add(0, piece, Part.CONTENT) for piece in pieces), reader.end("")):
        text, calls = text + read.text, [*calls, *read.calls]
    return text, calls
