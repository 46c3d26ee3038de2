"""Chat templates in the forms that models with tools have, without the texts of their system prompts."""

from __future__ import annotations

HERMES = r"""
{%- if tools %}
    {{- '<|im_start|>system\nFunctions: <tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As of Hermes 2 Pro, Qwen 2.5 and 3, and SmolLM 3."""

LLAMA = r"""
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call only') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|end|>\n\n' + message.content + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
"""
"""As of Llama 3.1: bare JSON, one call."""

MISTRAL = r"""
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']</s>' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""
"""As of Mistral 7B Instruct v0.3: a list behind a special token."""

XML = HERMES.replace(
    """{"name": "' + call.function.name + '", "arguments": ' }}""", """<function=' + call.function.name + '>' }}"""
).replace("{{- '}\\n</tool_call>' }}", "{{- '\\n</function>\\n</tool_call>' }}")
"""As of Qwen3-Coder: calls that are no JSON."""

THINKING = r"""
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = message.reasoning_content or message.content.split('</think>')[0].split('<think>')[-1] %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.last and message.reasoning_content %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As of Qwen 3: reasoning of the last answer is shown."""

THINKING_ALWAYS = THINKING.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n", "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}\n"
)
"""As of Qwen 3's thinking models: the prompt opens the reasoning."""

DROPPING = r"""
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|Assistant|>' + content + '<|end|>' }}
    {%- else %}
        {{- '<|User|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{%- endif %}
"""
"""As of DeepSeek R1: earlier reasoning is dropped, and the prompt opens that of the answer."""

WITHOUT_RESULTS = HERMES.replace("message.content + '\\n</tool_response>", "'\\n</tool_response>")
WITHOUT_TOOLS = "{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}"
