#!/usr/bin/env python3
"""GPT-2 in PyTorch, as examples/gpt2 is in Tandem: the same model, data, order, optimizer and lines of progress.

usage: gpt2_torch.py --data FILE [OPTION…]     the options are those of examples/gpt2, and --compile

scripts/bench-gpu compares the two.
"""

import argparse
import json
import math
import os
import resource
import struct
import time

import torch
from torch import nn
from torch.nn import functional as F

SIZES = {
    "124M": (12, 12, 768, 1024),
    "350M": (24, 16, 1024, 1024),
    "774M": (36, 20, 1280, 1024),
    "1.5B": (48, 25, 1600, 1024),
}


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        y = attend(q, k, v)
        return self.c_proj(y.transpose(1, 2).reshape(n, length, width))


def attend(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(gelu_tanh(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    def __init__(self, layers, heads, width, context, vocabulary):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                scale = 1 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        logits = F.linear(self.ln_f(self.h(x)), self.wte.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def is_transposed(name):
    """Hugging Face's linear layers have weights [in, out]."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def read_weights(path):
    """The f32 tensors of a safetensors file, in the layout of Gpt2."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    weights = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32", f"{path}: {name} is {entry['dtype']}"
        begin, end = entry["data_offsets"]
        tensor = torch.frombuffer(data, dtype=torch.float32, count=(end - begin) // 4, offset=begin)
        tensor = tensor.reshape(entry["shape"])
        weights[name] = tensor.t() if is_transposed(name) else tensor
    return weights


def make_optimizer(model, arguments):
    """AdamW; only matrices decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": arguments.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = {"fused": True} if arguments.device.startswith("cuda") else {}
    return torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), **fused)


def lr_of(step, arguments):
    """The learning rate of step 0, 1, …: a warm-up, then a half cosine."""
    if step < arguments.warmup:
        return arguments.lr * (step + 1) / arguments.warmup
    length = arguments.steps - arguments.warmup
    part = min(1, (step - arguments.warmup) / length) if length > 0 else 1
    return arguments.min_lr + (arguments.lr - arguments.min_lr) * (1 + math.cos(math.pi * part)) / 2


def read_tokens(arguments):
    """All tokens of the file: bytes, or numbers of 16 bits."""
    with open(arguments.data, "rb") as file:
        data = bytearray(file.read())
    if arguments.bytes:
        return torch.frombuffer(data, dtype=torch.uint8).long()
    return torch.frombuffer(data, dtype=torch.int16, count=len(data) // 2).long() & 0xFFFF


def batches(tokens, arguments):
    """The order of Tandem's sampler, which is that of DistributedSampler, with one replica."""
    length = arguments.context
    count = (len(tokens) - 1) // length
    epoch = 0
    while True:
        generator = torch.Generator()
        generator.manual_seed(arguments.seed + epoch)
        order = torch.randperm(count, generator=generator)
        for begin in range(0, count - arguments.batch + 1, arguments.batch):
            starts = order[begin : begin + arguments.batch].tolist()
            rows = torch.stack([tokens[s * length : s * length + length + 1] for s in starts])
            if arguments.device.startswith("cuda"):
                rows = rows.pin_memory().to(arguments.device, non_blocking=True)
            yield rows[:, :-1], rows[:, 1:]
        epoch += 1


def peak_mib(device):
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", choices=SIZES)
    for name, value in ("layers", 4), ("heads", 4), ("width", 128), ("context", 128):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--from", dest="weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    for name, value in ("batch", 8), ("steps", 300), ("seed", 1), ("log", 10):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--warmup", type=int)
    for name, value in ("lr", 6e-4), ("weight-decay", 0.1), ("clip", 1.0):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--min-lr", type=float)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.size:
        sizes = SIZES[arguments.size]
        arguments.layers, arguments.heads, arguments.width, arguments.context = sizes
    arguments.bytes = not arguments.data.endswith(".bin")
    arguments.vocabulary = arguments.vocabulary or (256 if arguments.bytes else 50257)
    if arguments.warmup is None:
        arguments.warmup = arguments.steps // 10
    if arguments.min_lr is None:
        arguments.min_lr = arguments.lr / 10
    return arguments


def make_model(arguments):
    torch.manual_seed(arguments.seed)
    model = Gpt2(
        arguments.layers, arguments.heads, arguments.width, arguments.context, arguments.vocabulary
    )
    if arguments.weights:
        model.load_state_dict(read_weights(arguments.weights))
    return model.to(arguments.device)


def train(arguments):
    """Prints a line for the first step and for each --log steps; returns the losses of all steps."""
    model = make_model(arguments)
    optimizer = make_optimizer(model, arguments)
    run = torch.compile(model) if arguments.compile else model
    data = batches(read_tokens(arguments), arguments)
    kind = arguments.device.split(":")[0]
    recent, losses, line_time = [], [], time.monotonic()
    for step in range(1, arguments.steps + 1):
        lr = lr_of(step - 1, arguments)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = next(data)
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=arguments.bf16):
            loss = run(tokens, targets)
        loss.backward()
        if arguments.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
        optimizer.step()
        recent.append(loss.detach())
        if step == 1 or step % arguments.log == 0 or step == arguments.steps:
            losses += [float(value) for value in recent]  # waits for the device
            seconds = time.monotonic() - line_time
            rate = len(recent) * tokens.numel() / seconds
            milliseconds = 1e3 * seconds / len(recent)
            print(
                f"step {step:5}/{arguments.steps}  loss {losses[-1]:.6f}  lr {lr:.2e}  "
                f"{rate:6.0f} tokens/s  {milliseconds:7.1f} ms a step",
                flush=True,
            )
            recent, line_time = [], time.monotonic()
    return losses


def main():
    arguments = read_arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    losses = train(arguments)
    print(f"  peak memory          {peak_mib(arguments.device):10.1f} MiB")
    if arguments.out:
        os.makedirs(arguments.out, exist_ok=True)
        with open(os.path.join(arguments.out, "loss.csv"), "w", encoding="utf-8") as file:
            file.write("step,loss\n")
            for step, loss in enumerate(losses, 1):
                file.write(f"{step},{loss:.9g}\n")


if __name__ == "__main__":
    main()
