"""Prompts and the messages in them, as both the console and the page find them."""

from __future__ import annotations

TEMPLATES = {
    "ChatML": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n",
    "Llama": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nTwo and two?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Phi": "<|system|>\nBe brief.<|end|>\n<|user|>\nTwo and two?<|end|>\n<|assistant|>\n",
    "ours": "<|system|>Be brief.<|end|><|user|>Two and two?<|end|><|assistant|>",
}

PROMPTS: list[tuple[str, list[tuple[str, str]]]] = [
    *((text, [("system", "Be brief."), ("user", "Two and two?")]) for text in TEMPLATES.values()),
    ("<s>[INST] Two and two? [/INST]", [("user", " Two and two? ")]),
    ("<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", [("user", "Hi")]),
    (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n",
        [("user", "Hi"), ("assistant", "yes")],
    ),
    ("<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c>", [("user", "Hi")]),
    ("<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n", [("user", "And then?")]),
    ("<|user|><tool_response>7\n</tool_response><|end|><|assistant|>", [("tool", "7\n")]),
    ("<|im_start|>assistant\n<think>\n", [("assistant", "<think>")]),
    ("<|im_start|>Constructor\nx<|im_start|>__proto__\ny", [("constructor", "x"), ("__proto__", "y")]),
    ("Q: 2+2?\nA:", [("", "Q: 2+2?\nA:")]),
    ("before <|user|>x", [("", "before "), ("user", "x")]),
    ("", []),
]


def hostile(size: int) -> list[str]:
    """Texts that take time in proportion to their length, a thousand characters for each of `size` or so."""
    return [
        "<|im_start|>" + " " * 1000 * size,
        "<|end|>" * 100 * size + "x",
        "[INST]" * 100 * size,
        " " * 1000 * size,
        ("<|im_start|>user\n" + " " * 2 * size + "x") * 1000,
        ("<|im_start|>user\n" + " " * 2000 + "x") * size,
    ]
