# ruff: noqa: RUF001  (DeepSeek's tokens have wide bars)
"""Templates in the manner of the families there are: which tokens serving sends, which the target writes, one by one.

Each shape is a small template and what it must give, written down by hand: ⟦...⟧ is supervised, the rest is context.
The tokenizer has a token for each byte and each special token, so a string says all there is to say about the ids.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.data.conversations import BadData, encode, load_tokenizer, prompt_ids, stop_ids
from paceline.data.templates import closing, spans

TINY = Path(__file__).parent.parent / "models" / "tiny"
SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CHAT = [user("a"), says("b"), user("c"), says("d")]
CALLED = [user("a"), says("", tool_calls=[CALL]), {"role": "tool", "content": "2"}, says("d")]


class Shape(NamedTuple):
    template: str
    rows: list[str]  # what a chat becomes: one row, or one a turn
    special: str = ""  # special tokens beside those of the bundled tokenizer, first the one that ends a text
    chat: list[dict[str, Any]] = CHAT
    end: str = ""  # of the assistant's turn
    tools: Any = None


def chatml(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}@user{% elif m.role == 'assistant' %}@says"
    "{% elif m.role == 'tool' %}@tool{% elif m.role == 'system' %}@system{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}@open{% endif %}"
)


def turns(**parts: str) -> str:
    """TURNS with jinja expressions in place of its words; nothing where one is not given."""
    turn = re.sub(r"@(\w+)", lambda word: "{{ " + parts[word[1]] + " }}" if word[1] in parts else "", TURNS)
    return parts.get("before", "") + turn + parts.get("after", "")


QWEN3 = (  # thoughts are kept in the last turn only, which has at least an empty one
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].strip() + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3_THINKING = QWEN3.replace(
    "'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
THOUGHT = [user("a"), says("<think>\nhm\n</think>\n\nb"), user("c"), says("<think>\noh\n</think>\n\nd")]
HARMONY = (
    "{{ '<|start|>system<|message|>s<|end|>' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.f to=assistant<|message|>' + m.content + '<|end|>' }}{% elif m.tool_calls %}"
    "{{ '<|start|>assistant to=functions.f<|channel|>commentary<|message|>' + "
    "m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
HARMONIC = "<|return|> <|start|> <|message|> <|end|> <|channel|> <|call|>"
LLAMA3 = turns(
    before="{{ '<|begin_of_text|>' }}",
    user="'<|start_header_id|>user<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>'",
    says='\'<|start_header_id|>assistant<|end_header_id|>\n\n\' + (\'{"name": "f", "parameters": \''
    " + m.tool_calls[0].function.arguments | tojson + '}<|eom_id|>' if m.tool_calls"
    " else m.content | trim + '<|eot_id|>')",
    tool="'<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>'",
    system="'<|start_header_id|>system<|end_header_id|>\n\n' + m.content + '<|eot_id|>'",
    open="'<|start_header_id|>assistant<|end_header_id|>\n\n'",
)
LLAMA3_SPECIAL = "<|end_of_text|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>"
MISTRAL = (  # a system message goes into the user turn that ends the text
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
    "{% if loop.last and s is defined %}{{ '[INST] ' + s + '\n\n' + m.content + '[/INST]' }}{% else %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}"
    "{% endfor %}"
)
NEMO = MISTRAL.replace("[INST] ", "[INST]").replace("{{ ' ' + m.content | trim", "{{ m.content")
DEEPSEEK = turns(
    before="{{ bos_token }}",
    user="'<｜User｜>' + m.content",
    says="'<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token",
    system="m.content",
    open="'<｜Assistant｜>'",
)
DEEPSEEK_SPECIAL = "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜>"
COHERE = "<|END_OF_TURN_TOKEN|> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
TURN, BOT, OVER = "<|START_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
TAIL = "<|im_start|>assistant\n"

SHAPES = {
    "chatml": Shape(
        CHATML,
        [chatml("user", "a") + f"{TAIL}⟦b<|im_end|>⟧\n" + chatml("user", "c") + f"{TAIL}⟦d<|im_end|>⟧\n"],
        end="<|im_end|>",
    ),
    "chatml, default system": Shape(
        "{% if messages and messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
        + CHATML,
        [
            chatml("system", "Be kind")
            + chatml("user", "a")
            + f"{TAIL}⟦b<|im_end|>⟧\n"
            + chatml("user", "c")
            + f"{TAIL}⟦d<|im_end|>⟧\n"
        ],
        end="<|im_end|>",
    ),
    "chatml, system turn, text begun by a token (InternLM2)": Shape(
        "{{ bos_token }}" + CHATML,
        ["<s>" + chatml("system", "s") + chatml("user", "a") + f"{TAIL}⟦b<|im_end|>⟧\n"],
        "</s> <s>",
        [SYSTEM, user("a"), says("b")],
        "<|im_end|>",
    ),
    "chatml, tools (Qwen2.5, Hermes)": Shape(
        "{% if tools %}{{ '<|im_start|>system\n' + tools[0].function.name + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}{{ '<|im_start|>assistant\n<tool_call>\n' + "
        "m.tool_calls[0].function.arguments | tojson + '\n</tool_call><|im_end|>\n' }}{% elif m.role == 'tool' %}"
        "{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}{% else %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        [
            chatml("system", "f")
            + chatml("user", "a")
            + TAIL
            + '⟦<tool_call>\n{"x": 1}\n</tool_call><|im_end|>⟧\n'
            + chatml("user", "<tool_response>2</tool_response>")
            + f"{TAIL}⟦d<|im_end|>⟧\n"
        ],
        chat=CALLED,
        end="<|im_end|>",
        tools=TOOLS,
    ),
    "chatml, tags": Shape(
        CHATML.replace(
            "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
            "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content }}"
            "{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}"
            "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}",
        ),
        [chatml("user", "a") + f"{TAIL}⟦b<|im_end|>⟧\n" + chatml("user", "c") + f"{TAIL}⟦d<|im_end|>⟧\n"],
        end="<|im_end|>",
    ),
    "separated roles (Phi-4)": Shape(
        turns(
            user="'<|im_start|>user<|im_sep|>' + m.content + '<|im_end|>'",
            says="'<|im_start|>assistant<|im_sep|>' + m.content + '<|im_end|>'",
            open="'<|im_start|>assistant<|im_sep|>'",
        ),
        [
            "<|im_start|>user<|im_sep|>a<|im_end|><|im_start|>assistant<|im_sep|>⟦b<|im_end|>⟧"
            "<|im_start|>user<|im_sep|>c<|im_end|><|im_start|>assistant<|im_sep|>⟦d<|im_end|>⟧"
        ],
        "<|endoftext|> <|im_sep|>",
        end="<|im_end|>",
    ),
    "named roles (Kimi)": Shape(
        turns(
            user="'<|im_user|>user<|im_middle|>' + m.content + '<|im_end|>'",
            says="'<|im_assistant|>assistant<|im_middle|>' + m.content + '<|im_end|>'",
            open="'<|im_assistant|>assistant<|im_middle|>'",
        ),
        [
            "<|im_user|>user<|im_middle|>a<|im_end|><|im_assistant|>assistant<|im_middle|>⟦b<|im_end|>⟧"
            "<|im_user|>user<|im_middle|>c<|im_end|><|im_assistant|>assistant<|im_middle|>⟦d<|im_end|>⟧"
        ],
        "[EOS] <|im_user|> <|im_assistant|> <|im_middle|>",
        end="<|im_end|>",
    ),
    "hybrid thinking (Qwen3), nothing thought": Shape(
        QWEN3,
        [
            chatml("user", "a") + f"{TAIL}⟦<think>\n\n</think>\n\nb<|im_end|>⟧\n",
            chatml("user", "a")
            + chatml("assistant", "b")
            + chatml("user", "c")
            + f"{TAIL}⟦<think>\n\n</think>\n\nd<|im_end|>⟧\n",
        ],
        end="<|im_end|>",
    ),
    "hybrid thinking (Qwen3), thought": Shape(
        QWEN3,
        [
            chatml("user", "a") + f"{TAIL}⟦<think>\nhm\n</think>\n\nb<|im_end|>⟧\n",
            chatml("user", "a")
            + chatml("assistant", "b")
            + chatml("user", "c")
            + f"{TAIL}⟦<think>\noh\n</think>\n\nd<|im_end|>⟧\n",
        ],
        chat=THOUGHT,
        end="<|im_end|>",
    ),
    "thinking opened by the prompt (Qwen3-Thinking)": Shape(
        QWEN3_THINKING,
        [
            chatml("user", "a") + f"{TAIL}<think>\n⟦hm\n</think>\n\nb<|im_end|>⟧\n",
            chatml("user", "a")
            + chatml("assistant", "b")
            + chatml("user", "c")
            + f"{TAIL}<think>\n⟦oh\n</think>\n\nd<|im_end|>⟧\n",
        ],
        chat=THOUGHT,
        end="<|im_end|>",
    ),
    "thinking switched off by an empty thought (SmolLM3)": Shape(
        turns(
            user="'<|im_start|>user\n' + m.content + '<|im_end|>\n'",
            says="'<|im_start|>assistant\n<think>\n\n</think>\n' + m.content + '<|im_end|>\n'",
            open="'<|im_start|>assistant\n<think>\n\n</think>\n'",
        ),
        [
            chatml("user", "a")
            + f"{TAIL}<think>\n\n</think>\n⟦b<|im_end|>⟧\n"
            + chatml("user", "c")
            + f"{TAIL}<think>\n\n</think>\n⟦d<|im_end|>⟧\n"
        ],
        end="<|im_end|>",
    ),
    "thinking dropped by the template (DeepSeek-R1)": Shape(
        DEEPSEEK.replace("{{ '<｜Assistant｜>' }}{% endif %}", "{{ '<｜Assistant｜><think>\n' }}{% endif %}"),
        [
            "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think>\n⟦hm\n</think>\n\nb<｜end▁of▁sentence｜>⟧",
            "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>\n\nb<｜end▁of▁sentence｜><｜User｜>c"
            "<｜Assistant｜><think>\n⟦oh\n</think>\n\nd<｜end▁of▁sentence｜>⟧",
        ],
        DEEPSEEK_SPECIAL,
        THOUGHT,
        "<｜end▁of▁sentence｜>",
    ),
    "DeepSeek-V3": Shape(
        DEEPSEEK,
        [
            "<｜begin▁of▁sentence｜>s<｜User｜>a<｜Assistant｜>⟦b<｜end▁of▁sentence｜>⟧"
            "<｜User｜>c<｜Assistant｜>⟦d<｜end▁of▁sentence｜>⟧"
        ],
        DEEPSEEK_SPECIAL,
        [SYSTEM, *CHAT],
        "<｜end▁of▁sentence｜>",
    ),
    "Llama-2": Shape(
        "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (s if loop.first else '') + "
        "m.content | trim + ' [/INST]' }}{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}"
        "{% endfor %}",
        ["<s>[INST] <<SYS>>\ns\n<</SYS>>\n\na [/INST]⟦ b </s>⟧<s>[INST] c [/INST]⟦ d </s>⟧"],
        "</s> <s>",
        [SYSTEM, *CHAT],
        " </s>",
    ),
    "Llama-3": Shape(
        LLAMA3,
        [
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦b<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦d<|eot_id|>⟧"
        ],
        LLAMA3_SPECIAL,
        [SYSTEM, *CHAT],
        "<|eot_id|>",
    ),
    "Llama-3.1, a call ends otherwise": Shape(
        LLAMA3,
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
            '<|start_header_id|>assistant<|end_header_id|>\n\n⟦{"name": "f", "parameters": {"x": 1}}<|eom_id|>⟧'
            "<|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦d<|eot_id|>⟧"
        ],
        LLAMA3_SPECIAL,
        CALLED,
        "<|eot_id|>",
    ),
    "Mistral v0.1": Shape(
        turns(before="{{ bos_token }}", user="'[INST] ' + m.content + ' [/INST]'", says="m.content + eos_token + ' '"),
        ["<s>[INST] a [/INST]⟦b</s>⟧ [INST] c [/INST]⟦d</s>⟧ "],
        "</s> <s>",
        end="</s>",
    ),
    "Mistral v0.3": Shape(
        MISTRAL,
        ["<s>[INST] a[/INST]⟦ b</s>⟧[INST] c[/INST]⟦ d</s>⟧"],
        "</s> <s> [INST] [/INST]",
        end="</s>",
    ),
    "Mistral v0.3, the system message moves to the last user turn": Shape(
        MISTRAL,
        ["<s>[INST] s\n\na[/INST]⟦ b</s>⟧", "<s>[INST] a[/INST] b</s>[INST] s\n\nc[/INST]⟦ d</s>⟧"],
        "</s> <s> [INST] [/INST]",
        [SYSTEM, *CHAT],
        "</s>",
    ),
    "Mistral Nemo, the system message moves to the last user turn": Shape(
        NEMO,
        ["<s>[INST]s\n\na[/INST]⟦b</s>⟧", "<s>[INST]a[/INST]b</s>[INST]s\n\nc[/INST]⟦d</s>⟧"],
        "</s> <s> [INST] [/INST]",
        [SYSTEM, *CHAT],
        "</s>",
    ),
    "Mistral Small, a system prompt of its own": Shape(
        turns(
            before="{{ bos_token }}",
            system="'[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]'",
            user="'[INST]' + m.content + '[/INST]'",
            says="'[TOOL_CALLS]' + m.tool_calls[0].function.arguments | tojson + eos_token if m.tool_calls"
            " else m.content + eos_token",
            tool="'[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]'",
        ),
        ['<s>[INST]a[/INST]⟦[TOOL_CALLS]{"x": 1}</s>⟧[TOOL_RESULTS]2[/TOOL_RESULTS]⟦d</s>⟧'],
        "</s> <s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        CALLED,
        "</s>",
    ),
    "Gemma": Shape(
        turns(
            before="{{ bos_token }}",
            user="'<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n'",
            says="'<start_of_turn>model\n' + m.content | trim + '<end_of_turn>\n'",
            open="'<start_of_turn>model\n'",
        ),
        [
            "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n⟦b<end_of_turn>⟧\n"
            "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n⟦d<end_of_turn>⟧\n"
        ],
        "<eos> <bos> <start_of_turn> <end_of_turn>",
        end="<end_of_turn>",
    ),
    "Zephyr": Shape(
        turns(
            user="'<|user|>\n' + m.content + eos_token + '\n'",
            says="'<|assistant|>\n' + m.content + eos_token + '\n'",
            system="'<|system|>\n' + m.content + eos_token + '\n'",
            open="'<|assistant|>\n'",
        ),
        ["<|system|>\ns</s>\n<|user|>\na</s>\n<|assistant|>\n⟦b</s>⟧\n<|user|>\nc</s>\n<|assistant|>\n⟦d</s>⟧\n"],
        "</s>",
        [SYSTEM, *CHAT],
        "</s>",
    ),
    "Phi-3, a text ends otherwise than a turn": Shape(
        turns(
            user="'<|user|>\n' + m.content + '<|end|>\n'",
            says="'<|assistant|>\n' + m.content + '<|end|>\n'",
            open="'<|assistant|>\n'",
            after="{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ),
        ["<|user|>\na<|end|>\n<|assistant|>\n⟦b<|end|>⟧\n<|user|>\nc<|end|>\n<|assistant|>\n⟦d<|end|>⟧\n<|endoftext|>"],
        "<|endoftext|> <|user|> <|assistant|> <|end|>",
        end="<|end|>",
    ),
    "Phi-4-mini, the end of the text follows that of the turn": Shape(
        turns(
            user="'<|user|>' + m.content + '<|end|>'",
            says="'<|assistant|>' + m.content + '<|end|>'",
            open="'<|assistant|>'",
            after="{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ),
        ["<|user|>a<|end|><|assistant|>⟦b<|end|>⟧<|user|>c<|end|><|assistant|>⟦d<|end|>⟧<|endoftext|>"],
        "<|endoftext|> <|user|> <|assistant|> <|end|>",
        end="<|end|>",
    ),
    "Command R": Shape(
        turns(
            before="{{ bos_token }}",
            system=f"'{TURN}<|SYSTEM_TOKEN|>' + m.content + '{OVER}'",
            user=f"'{TURN}<|USER_TOKEN|>' + m.content + '{OVER}'",
            says=f"'{BOT}' + m.content + '{OVER}'",
            open=f"'{BOT}'",
        ),
        [
            f"<BOS_TOKEN>{TURN}<|SYSTEM_TOKEN|>s{OVER}{TURN}<|USER_TOKEN|>a{OVER}{BOT}⟦b{OVER}⟧"
            f"{TURN}<|USER_TOKEN|>c{OVER}{BOT}⟦d{OVER}⟧"
        ],
        COHERE,
        [SYSTEM, *CHAT],
        OVER,
    ),
    "Command R7B, two tokens end a turn": Shape(
        turns(
            before="{{ bos_token }}",
            user=f"'{TURN}<|USER_TOKEN|>' + m.content + '{OVER}'",
            says=f"'{BOT}<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>{OVER}'",
            open=f"'{BOT}'",
        ),
        [
            f"<BOS_TOKEN>{TURN}<|USER_TOKEN|>a{OVER}{BOT}⟦<|START_RESPONSE|>b<|END_RESPONSE|>{OVER}⟧"
            f"{TURN}<|USER_TOKEN|>c{OVER}{BOT}⟦<|START_RESPONSE|>d<|END_RESPONSE|>{OVER}⟧"
        ],
        COHERE + " <|START_RESPONSE|> <|END_RESPONSE|>",
        end=f"<|END_RESPONSE|>{OVER}",
    ),
    "Granite": Shape(
        turns(
            user="'<|start_of_role|>user<|end_of_role|>' + m.content + '<|end_of_text|>\n'",
            says="'<|start_of_role|>assistant<|end_of_role|>' + m.content + '<|end_of_text|>\n'",
            open="'<|start_of_role|>assistant<|end_of_role|>'",
        ),
        [
            "<|start_of_role|>user<|end_of_role|>a<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
            "⟦b<|end_of_text|>⟧\n<|start_of_role|>user<|end_of_role|>c<|end_of_text|>\n"
            "<|start_of_role|>assistant<|end_of_role|>⟦d<|end_of_text|>⟧\n"
        ],
        "<|end_of_text|> <|start_of_role|> <|end_of_role|>",
        end="<|end_of_text|>",
    ),
    "harmony (gpt-oss), the last turn ends otherwise": Shape(
        HARMONY,
        [
            "<|start|>system<|message|>s<|end|><|start|>user<|message|>a<|end|>"
            "<|start|>assistant⟦<|channel|>analysis<|message|>hm<|end|>"
            "<|start|>assistant<|channel|>final<|message|>b<|return|>⟧",
            "<|start|>system<|message|>s<|end|><|start|>user<|message|>a<|end|>"
            "<|start|>assistant<|channel|>final<|message|>b<|end|><|start|>user<|message|>c<|end|>"
            "<|start|>assistant⟦<|channel|>final<|message|>d<|return|>⟧",
        ],
        HARMONIC,
        [user("a"), says("b", reasoning_content="hm"), user("c"), says("d")],
        "<|return|>",
    ),
    "harmony (gpt-oss), a call": Shape(
        HARMONY,
        [
            "<|start|>system<|message|>s<|end|><|start|>user<|message|>a<|end|>"
            '<|start|>assistant⟦ to=functions.f<|channel|>commentary<|message|>{"x": 1}<|call|>⟧'
            "<|start|>functions.f to=assistant<|message|>2<|end|>"
            "<|start|>assistant⟦<|channel|>final<|message|>d<|return|>⟧",
        ],
        HARMONIC,
        CALLED,
        "<|return|>",
    ),
    "OLMo, no line break after the last turn": Shape(
        turns(
            before="{{ bos_token }}",
            user="'<|user|>\n' + m.content + '\n'",
            says="'<|assistant|>\n' + m.content + eos_token + ('' if loop.last else '\n')",
            open="'<|assistant|>\n'",
        ),
        ["<s><|user|>\na\n<|assistant|>\n⟦b</s>⟧\n<|user|>\nc\n<|assistant|>\n⟦d</s>⟧"],
        "</s> <s>",
        end="</s>",
    ),
    "Vicuna, roles are words": Shape(
        turns(
            before="{{ bos_token + 'A chat.' }}",
            user="' USER: ' + m.content",
            says="' ASSISTANT: ' + m.content + eos_token",
            open="' ASSISTANT:'",
        ),
        ["<s>A chat. USER: a ASSISTANT:⟦ b</s>⟧ USER: c ASSISTANT:⟦ d</s>⟧"],
        "</s> <s>",
        end="</s>",
    ),
    "Alpaca": Shape(
        turns(
            user="'### Instruction:\n' + m.content + '\n\n'",
            says="'### Response:\n' + m.content + eos_token + '\n\n'",
            open="'### Response:\n'",
        ),
        ["### Instruction:\na\n\n### Response:\n⟦b</s>⟧\n\n### Instruction:\nc\n\n### Response:\n⟦d</s>⟧\n\n"],
        "</s>",
        end="</s>",
    ),
    "OpenChat": Shape(
        turns(
            before="{{ bos_token }}",
            user="'GPT4 Correct User: ' + m.content + '<|end_of_turn|>'",
            says="'GPT4 Correct Assistant: ' + m.content + '<|end_of_turn|>'",
            open="'GPT4 Correct Assistant:'",
        ),
        [
            "<s>GPT4 Correct User: a<|end_of_turn|>GPT4 Correct Assistant:⟦ b<|end_of_turn|>⟧"
            "GPT4 Correct User: c<|end_of_turn|>GPT4 Correct Assistant:⟦ d<|end_of_turn|>⟧"
        ],
        "</s> <s> <|end_of_turn|>",
        end="<|end_of_turn|>",
    ),
    "EXAONE": Shape(
        turns(
            user="'[|user|]' + m.content + '\n'",
            says="'[|assistant|]' + m.content + '[|endofturn|]\n'",
            system="'[|system|]' + m.content + '[|endofturn|]\n'",
            open="'[|assistant|]'",
        ),
        [
            "[|system|]s[|endofturn|]\n[|user|]a\n[|assistant|]⟦b[|endofturn|]⟧\n[|user|]c\n[|assistant|]⟦d[|endofturn|]⟧\n"
        ],
        "<eos> [|user|] [|assistant|] [|system|] [|endofturn|]",
        [SYSTEM, *CHAT],
        "[|endofturn|]",
    ),
    "GLM-4, nothing ends a turn but the next role": Shape(
        turns(
            before="{{ '[gMASK]<sop>' }}",
            user="'<|user|>\n' + m.content",
            says="'<|assistant|>\n' + m.content",
            open="'<|assistant|>\n'",
        ),
        ["[gMASK]<sop><|user|>\na<|assistant|>\n⟦b⟧<|user|>\nc<|assistant|>\n⟦d⟧"],
        "<eos> [gMASK] <sop> <|user|> <|assistant|>",
    ),
    "MiniCPM, roles are no special tokens": Shape(
        turns(user="'<用户>' + m.content", says="'<AI>' + m.content + eos_token", open="'<AI>'"),
        ["<用户>a<AI>⟦b</s>⟧<用户>c<AI>⟦d</s>⟧"],
        "</s>",
        end="</s>",
    ),
    "no opening: the target writes the role as well": Shape(
        CHATML.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", ""),
        [
            chatml("user", "a")
            + "⟦<|im_start|>assistant\nb<|im_end|>⟧\n"
            + chatml("user", "c")
            + "⟦<|im_start|>assistant\nd<|im_end|>⟧\n"
        ],
        end="<|im_end|>",
    ),
}


def tokenizer_of(shape: Shape) -> Any:
    tokenizer = load_tokenizer(TINY)
    names = shape.special.split()
    tokenizer.add_tokens(names, special_tokens=True)
    if names:
        tokenizer.eos_token = names[0]
        tokenizer.bos_token = names[1] if len(names) > 1 else None
    tokenizer.chat_template = shape.template
    return tokenizer


def read(tokenizer: Any, marked: str) -> tuple[list[int], list[bool]]:
    """Ids and mask that a string with ⟦⟧ stands for, by hand: a special token is one id, the rest its bytes."""
    special = tokenizer.get_added_vocab()
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    ids: list[int] = []
    mask: list[bool] = []
    inside = False
    for piece in re.split(f"({pattern}|⟦|⟧)", marked):
        if piece in ("⟦", "⟧"):
            inside = piece == "⟦"
            continue
        new = [special[piece]] if piece in special else list(piece.encode())
        ids, mask = ids + new, mask + [inside] * len(new)
    return ids, mask


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_gives_these_ids_and_this_mask(name: str) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_of(shape)
    rows = encode(tokenizer, shape.chat, 512, tools=shape.tools)
    expected = [read(tokenizer, row) for row in shape.rows]
    assert [(row.ids.tolist(), row.supervised.tolist()) for row in rows] == expected
    assert closing(tokenizer).end == shape.end


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_supervised_begins_where_the_prompt_as_served_ends(name: str) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_of(shape)
    rows = encode(tokenizer, shape.chat, 512, tools=shape.tools)
    replies = [j for j, message in enumerate(shape.chat) if message["role"] == "assistant"]
    for number, j in enumerate(replies):
        served = prompt_ids(tokenizer, shape.chat[:j], shape.tools)
        row = rows[min(number, len(rows) - 1)] if len(rows) > 1 else rows[0]
        assert row.ids[: len(served)].tolist() == served
        assert row.supervised[len(served)] and not row.supervised[len(served) - 1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_reply_cut_short_does_not_teach_its_end(name: str) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_of(shape)
    row = encode(tokenizer, shape.chat, 512, finished=False, tools=shape.tools)[-1]
    ids, mask = read(tokenizer, shape.rows[-1])
    end = len(read(tokenizer, shape.end)[0])
    last = len(mask) - mask[::-1].index(True)
    mask[last - end : last] = [False] * end
    assert row.ids.tolist() == ids[: len(row)] and row.supervised.tolist() == mask[: len(row)]
    assert not any(mask[len(row) :])


def test_the_shapes_are_many() -> None:
    assert len({shape.template for shape in SHAPES.values()}) >= 30


def test_the_end_of_a_turn_stops_the_decoder_also_where_it_is_not_the_end_of_a_text() -> None:
    for name, ends in (("Llama-3", ["<|eot_id|>", "<|end_of_text|>"]), ("Command R7B, two tokens end a turn", [OVER])):
        tokenizer = tokenizer_of(SHAPES[name])
        assert stop_ids(tokenizer) == sorted(tokenizer.convert_tokens_to_ids(ends))


# What the template refuses, and what is refused of templates


def refusals(shape: Shape, chat: list[dict[str, Any]], **more: Any) -> tuple[list[Any], dict[str, Any]]:
    from paceline.data.conversations import Record, Skipped, encode_all

    left = Skipped("assistant turns")
    ((_, rows, _),) = encode_all(tokenizer_of(shape), [(7, Record(chat))], 512, left, **more)
    return rows, left.reasons


def test_a_turn_that_the_template_cannot_take_is_counted_in_its_words() -> None:
    gemma = SHAPES["Gemma"].template.replace(
        "{% elif m.role == 'system' %}",
        "{% elif m.role == 'system' %}{{ raise_exception('System role not supported') }}",
    )
    rows, reasons = refusals(SHAPES["Gemma"]._replace(template=gemma), [SYSTEM, *CHAT])
    assert rows == [] and reasons == {"the chat template refuses the conversation: System role not supported": [7]}


def test_what_the_template_cannot_take_is_not_held_out_to_be_asked(tmp_path: Path) -> None:
    """Training would end with it at the first decode: Gemma's templates know no system message."""
    from paceline.data.conversations import load

    gemma = SHAPES["Gemma"].template.replace(
        "{% elif m.role == 'system' %}", "{% elif m.role == 'system' %}{{ raise_exception('no system here') }}"
    )
    tokenizer = tokenizer_of(SHAPES["Gemma"]._replace(template=gemma))
    chats = [{"messages": [*([SYSTEM] if i % 2 else []), user(f"a{i}"), says("b")]} for i in range(12)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    data = load(tokenizer, "jsonl", str(file), held_out=0.6)
    assert len(data.held_out_conversations) == len(data.held_out) < data.provenance["held_out"]
    for chat in data.held_out_conversations:
        prompt_ids(tokenizer, chat.messages[:-1])
    with pytest.raises(BadData, match=r"^target: the chat template of \S* ?refuses \(system, user\): no system here$"):
        prompt_ids(tokenizer, [SYSTEM, user("a")])
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(BadData, match=r"refuses \(user, assistant\): never$"):
        closing(tokenizer)


def test_a_thought_that_the_prompt_opens_and_the_reply_never_closes_is_not_supervised() -> None:
    name = "thinking dropped by the template (DeepSeek-R1)"
    rows, reasons = refusals(SHAPES[name], [user("a"), says("b"), user("c"), says("oh\n</think>d")])
    assert reasons == {"the generation prompt opens <think>, which the reply never closes": [7]}
    ids, mask = read(
        tokenizer_of(SHAPES[name]),
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>b<｜end▁of▁sentence｜><｜User｜>c"
        "<｜Assistant｜><think>\n⟦oh\n</think>d<｜end▁of▁sentence｜>⟧",
    )
    assert [(row.ids.tolist(), row.supervised.tolist()) for row in rows] == [(ids, mask)]


def test_tags_do_not_make_a_turn_of_what_the_prompt_did_not_open() -> None:
    opens = SHAPES["chatml, tags"].template.replace(
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n'",
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant:\n'",
    )
    rows, reasons = refusals(SHAPES["chatml, tags"]._replace(template=opens), CHAT[:2])
    assert rows == [] and reasons == {"the rendered turn does not continue the generation prompt": [7]}


def test_a_bundled_template_stands_in_only_where_it_renders_the_same() -> None:
    shape = SHAPES["Mistral v0.3, the system message moves to the last user turn"]
    other = shape._replace(template=shape.template.replace("{{ ' ' + m.content | trim", "{{ '  ' + m.content | trim"))
    rows, reasons = refusals(other, shape.chat)
    assert rows == [] and reasons == {"the rendered turn does not continue the generation prompt": [7, 7]}


def test_a_template_with_tags_may_be_given_and_must_render_the_same(tmp_path: Path) -> None:
    plain, file = SHAPES["chatml"], tmp_path / "tagged.jinja"
    only = "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{{ m.content[:1] }}{% generation %}"
    only += "{{ m.content[1:] }}{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}"
    file.write_text(
        plain.template.replace("{{ '<|im_start|>' + m.role", only + "{{ '<|im_start|>' + m.role").replace(
            "'<|im_end|>\n' }}{% endfor %}", "'<|im_end|>\n' }}{% endif %}{% endfor %}"
        )
    )
    (row,), reasons = refusals(plain, [user("a"), says("bcd")], template=file)
    expected = read(tokenizer_of(plain), chatml("user", "a") + f"{TAIL}b⟦cd<|im_end|>⟧\n")
    assert (row.ids.tolist(), row.supervised.tolist()) == expected and reasons == {}
    rows, reasons = refusals(SHAPES["chatml, default system"], CHAT, template=file)
    assert rows == [] and list(reasons) == [
        "data.template renders the conversation otherwise than the target's own template"
    ]
    file.write_text(plain.template)
    with pytest.raises(BadData, match=r"data\.template: .* has no \{% generation %\} tag"):
        refusals(plain, CHAT, template=file)


def test_the_masks_of_bundled_templates_are_those_of_the_comparison() -> None:
    """Where both ways lead to a mask they agree: the tags are the slow, sure way to say it."""
    from paceline.data.templates import bundled

    for name, template in zip(
        ("Mistral v0.3", "Mistral Nemo, the system message moves to the last user turn"), bundled(), strict=True
    ):
        tokenizer = tokenizer_of(SHAPES[name])
        text, marked = spans(tokenizer, CHAT, None, template)
        (row,) = encode(tokenizer, CHAT, 512)
        assert row.ids.tolist() == read(tokenizer, text)[0]
        by_tags = "".join(text[begin:end] for begin, end in marked)
        assert tokenizer.decode(row.ids[row.supervised]) == by_tags
