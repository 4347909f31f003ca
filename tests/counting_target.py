"""A tiny Llama that learned a little language, so that a draft for it can be good, and a fault in it be seen.

Asked for seven letters, it counts them up: thinking, five lines of letters, each one further along the alphabet, then
an answer; not thinking, lines of digits that count down. Each letter depends on the one eight places earlier, so
attention by distance decides: rope matters, and so do layers, maps and heads. Its final norm is far from even, so a
norm left out shows. Learned in well under a minute.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from toy_chat import save_toy_tokenizer

LETTERS, DIGITS, WIDTH, LINES = "abcdef", "012345", 7, 5
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
STEPS, EARLY, BATCH, LR = 200, 120, 16, 4e-3


def question(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(WIDTH))


def counted(asked: str, step: int, letters: str = LETTERS) -> str:
    """Each letter `step` places on, round and round."""
    return "".join(letters[(LETTERS.index(letter) + step) % len(letters)] for letter in asked)


def thoughtful(asked: str, pace: int = 1) -> str:
    """The reply with thinking on; the target's own pace is 1."""
    lines = "".join("\n" + counted(asked, pace * n) for n in range(1, LINES + 1))
    return f"<think>{lines}</think>={counted(asked, pace * (LINES + 1))}<|end|>"


def curt(asked: str) -> str:
    """The reply with thinking off."""
    return "".join("\n" + counted(asked, n, DIGITS) for n in range(LINES, 0, -1)) + "<|end|>"


def save_counting_target(folder: Path, early: Path) -> Path:
    """Trains and saves it; `early` is the same model before it had finished learning."""
    for place in (folder, early):
        save_toy_tokenizer(place)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer) + 5,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.1,
            rope_parameters=ROPE,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.exp(0.8 * torch.randn(64)))
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for step in range(STEPS):
        if step == EARLY:
            model.save_pretrained(early)
        ids, labels = _batch(tokenizer, rng)
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / 30) * (1 - step / STEPS)
        model(ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def _batch(tokenizer: object, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for _ in range(BATCH):
        asked, thinks = question(rng), rng.random() < 0.7
        prompt = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [{"role": "user", "content": asked}],
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=thinks,
        )
        reply = thoughtful(asked) if thinks else curt(asked)
        rows.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, reply)])  # type: ignore[operator]
    width = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids, labels = torch.zeros(BATCH, width, dtype=torch.long), torch.full((BATCH, width), -100)
    for row, (prompt, reply) in enumerate(rows):
        ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    return ids, labels
