#!/usr/bin/env python3
"""Records gpt2.safetensors and gpt2_vectors.h beside this file: a small GPT-2 in PyTorch, and its numbers.

The file is as Hugging Face writes them: weights of linear layers [in, out], "transformer." before each name, the masks of
the attention, and the head beside wte.weight.
"""

import argparse
import json
import struct
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "bench"))
import gpt2_torch

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = 2, 3, 24, 16, 32
BATCH, LENGTH, STEPS = 2, 12, 6


def make_model():
    """Weights that are larger than initial ones, so that every part of the model matters."""
    torch.manual_seed(1)
    model = gpt2_torch.Gpt2(LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1 if "ln_" in name and name.endswith("weight") else 0, 0.2)
    return model


def write_safetensors(path, model):
    tensors = {}
    for name, tensor in model.state_dict().items():
        turned = gpt2_torch.is_transposed(name)
        tensors[f"transformer.{name}"] = (tensor.t() if turned else tensor).contiguous()
    for layer in range(LAYERS):
        mask = torch.ones(CONTEXT, CONTEXT).tril().reshape(1, 1, CONTEXT, CONTEXT)
        tensors[f"transformer.h.{layer}.attn.bias"] = mask
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = model.wte.weight.detach()
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in sorted(tensors.items()):
        content = tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def losses_of(model, tokens, targets):
    """Of steps with the program's default settings, but for a rate of learning that does not change."""
    arguments = argparse.Namespace(device="cpu", weight_decay=0.1, lr=0.01)
    optimizer = gpt2_torch.make_optimizer(model, arguments)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def list_of(name, kind, numbers):
    body = ", ".join(f"{number:.9g}" if kind != "int64_t" else str(number) for number in numbers)
    return f"static const {kind} {name}[{len(numbers)}] = {{{body}}};\n"


def main():
    torch.set_num_threads(1)
    model = make_model()
    write_safetensors(HERE / "gpt2.safetensors", model)
    text = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    logits = model(tokens).detach()
    lines = [
        f"/* Recorded with PyTorch {torch.__version__} by record_gpt2.py. */\n",
        "#include <stdint.h>\n\n",
        f"enum {{ GPT2_HEADS = {HEADS}, GPT2_BATCH = {BATCH}, GPT2_LENGTH = {LENGTH}, GPT2_STEPS = {STEPS} }};\n",
        list_of("gpt2_tokens", "int64_t", tokens.flatten().tolist()),
        list_of("gpt2_targets", "int64_t", targets.flatten().tolist()),
        list_of("gpt2_logits", "float", logits.flatten().tolist()),
        list_of("gpt2_losses", "float", losses_of(model, tokens, targets)),
    ]
    (HERE / "gpt2_vectors.h").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
