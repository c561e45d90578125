#!/usr/bin/env python3
"""Records results and gradients of PyTorch's operators for tests/test_ops_reference.c.

    tests/reference/record_ops.py > tests/reference/ops_vectors.h

A case is a name, which the test knows the call of, its inputs, a gradient for its result, the
result, and the gradients of the inputs that have one. All numbers stand in one array, as f32.
"""

import math

import torch
import torch.nn.functional as F

numbers = []
cases = []


def rand(*shape):
    """Normal numbers, rounded to what is short in decimal."""
    return torch.round(torch.randn(*shape) * 32) / 32


def classes(count, *shape):
    return torch.randint(0, count, shape)


def describe(tensor):
    start = len(numbers)
    numbers.extend(float(v) for v in tensor.detach().flatten().tolist())
    shape = list(tensor.shape)
    sizes = ", ".join(str(s) for s in shape) if shape else "0"
    is_index = "true" if tensor.dtype == torch.int64 else "false"
    return f"{{{start}, {len(shape)}, {{{sizes}}}, {is_index}}}"


def record(name, function, *inputs):
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    torch.manual_seed(77)
    result = function(*leaves)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    gradient = torch.round(gradient * 8) / 8
    result.backward(gradient)
    tensors = [*inputs, gradient, result]
    tensors += [x.grad for x in leaves if x.is_floating_point()]
    listed = ",\n         ".join(describe(t) for t in tensors)
    cases.append(f'    {{"{name}", {len(inputs)}, {len(tensors)},\n        {{{listed}}}}},')


def products():
    record("matmul", torch.matmul, rand(4, 5), rand(5, 3))
    record("matmul", torch.matmul, rand(5), rand(5))
    record("matmul", torch.matmul, rand(2, 1, 3, 4), rand(3, 4, 2))
    record("matmul", torch.matmul, rand(2, 3, 4), rand(4))
    record("linear", F.linear, rand(6, 7), rand(5, 7), rand(5))
    record("linear", F.linear, rand(2, 3, 7), rand(4, 7), rand(4))
    record("conv2d", F.conv2d, rand(2, 3, 7, 6), rand(4, 3, 3, 3), rand(4))
    record(
        "conv2d_options",
        lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 2), (1, 2), 2),
        *(rand(2, 4, 8, 7), rand(6, 2, 3, 2), rand(6)),
    )
    record("conv2d", F.conv2d, rand(1, 1, 12, 12), rand(5, 1, 5, 5), rand(5))


def pools():
    record("max_pool2d", lambda x: F.max_pool2d(x, 2), rand(2, 3, 6, 7))
    strides = ((3, 2), (2, 1), (1, 1), (1, 2))
    record("max_pool2d_options", lambda x: F.max_pool2d(x, *strides), rand(2, 2, 7, 6))
    record("avg_pool2d", lambda x: F.avg_pool2d(x, 2), rand(2, 3, 6, 7))
    record(
        "avg_pool2d_options",
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        rand(1, 2, 7, 6),
    )
    record("avg_pool2d_padding", lambda x: F.avg_pool2d(x, 3, 2, 1), rand(1, 2, 7, 6))
    record("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), rand(2, 2, 7, 5))
    record("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (3, 2)), rand(2, 2, 7, 5))


def activations():
    x = torch.cat([rand(20) * 3, torch.tensor([0.0, -0.0, 30.0, -30.0, 100.0, -100.0])])
    record("relu", F.relu, x)
    record("gelu", F.gelu, x)
    record("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), x)
    record("silu", F.silu, x)
    record("tanh", torch.tanh, x)
    record("sigmoid", torch.sigmoid, x)
    record("softmax_1", lambda x: F.softmax(x, 1), rand(3, 5, 4) * 4)
    record("softmax_last", lambda x: F.softmax(x, -1), rand(4, 33) * 4)
    record("log_softmax_1", lambda x: F.log_softmax(x, 1), rand(3, 5, 4) * 4)
    record("log_softmax_last", lambda x: F.log_softmax(x, -1), rand(4, 33) * 4)
    record("dropout", lambda x: F.dropout(x, 0.3), rand(5, 9))
    record("dropout", lambda x: F.dropout(x, 0.3), rand(3, 40))
    record("dropout2d", lambda x: F.dropout2d(x, 0.5), rand(4, 6, 2, 3))


def norms():
    def running():
        return torch.full((3,), 0.25), torch.full((3,), 1.5)

    def batch_norm(x, w, b):
        return F.batch_norm(x, *running(), w, b, True, 0.1, 1e-5)

    def batch_norm_eval(x, w, b):
        return F.batch_norm(x, *running(), w, b, False, 0.1, 1e-5)

    def moved(which):
        def move(x):
            statistics = running()
            F.batch_norm(x, *statistics, training=True, momentum=0.2)
            return statistics[which] + 0 * x.sum()

        return move

    record("batch_norm", batch_norm, rand(4, 3, 2, 5) * 2 + 3, rand(3), rand(3))
    record("batch_norm", batch_norm, rand(6, 3), rand(3), rand(3))
    record("batch_norm_eval", batch_norm_eval, rand(4, 3, 5), rand(3), rand(3))
    record("running_mean", moved(0), rand(4, 3, 5) + 2)
    record("running_var", moved(1), rand(4, 3, 5) + 2)
    x = rand(2, 3, 17) * 2 + 1
    record("layer_norm_1", lambda x, w, b: F.layer_norm(x, (17,), w, b), x, rand(17), rand(17))
    x, w, b = rand(4, 3, 5), rand(3, 5), rand(3, 5)
    record("layer_norm_2", lambda x, w, b: F.layer_norm(x, (3, 5), w, b), x, w, b)


def attention(q, k, v, mask=None, dropout=0.0):
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    return F.dropout(F.softmax(scores, -1), dropout, dropout > 0) @ v


def attentions():
    q, k, v = rand(2, 3, 5, 4), rand(2, 3, 6, 4), rand(2, 3, 6, 4)
    causal = torch.full((5, 6), -math.inf).triu(1)
    record("attention", attention, q, k, v)
    record("attention_causal", lambda q, k, v: attention(q, k, v, causal), q, k, v)
    record("attention_mask", attention, q, k, v, rand(5, 6))
    record("attention_dropout", lambda q, k, v: attention(q, k, v, causal, 0.25), q, k, v)


def tables():
    record("embedding", F.embedding, classes(9, 3, 4), rand(9, 5))
    indices = classes(4, 3, 4)
    record("embedding_padding", lambda i, w: F.embedding(i, w, padding_idx=2), indices, rand(4, 5))


def losses():
    x, target, weight = rand(7, 5) * 2, classes(5, 7), torch.round(torch.rand(5) * 32) / 32 + 0.125
    for name in ("mean", "sum", "none"):
        plain = {"reduction": name}
        options = {"weight": weight, "ignore_index": 3, "reduction": name}
        record(f"nll_{name}", lambda x, t: F.nll_loss(x, t, **options), x, target)
        record(f"cross_entropy_{name}", lambda x, t: F.cross_entropy(x, t, **options), x, target)
        record(
            f"smooth_{name}",
            lambda x, t: F.cross_entropy(x, t, **options, label_smoothing=0.1),
            *(x, target),
        )
        record(f"mse_{name}", lambda x, t: F.mse_loss(x, t, **plain), x, rand(7, 5))
        record(f"l1_{name}", lambda x, t: F.l1_loss(x, t, **plain), x, rand(7, 5))
        record(
            f"bce_{name}",
            lambda x, t: F.binary_cross_entropy_with_logits(x, t, **plain),
            *(x * 5, torch.round(torch.rand(7, 5) * 64) / 64),
        )
    record("cross_entropy", F.cross_entropy, rand(2, 4, 3, 3), classes(4, 2, 3, 3))
    record(
        "cross_entropy_smooth",
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2),
        *(rand(3, 6), classes(6, 3)),
    )
    return weight


# Changes through views, as in tests/view_programs.c.


def view_slice(a, b):
    x = a * 1.5
    x[1:3].mul_(b)
    return x.sin()


def view_step(a, b):
    x = a * 1.5
    x[:, 1::2].div_(b[1:3])
    return x.sin()


def view_transposed(a, b):
    x = a * 1.5
    t = x.t()
    t[2].add_(b[:3], alpha=2)
    return x.sin() * t.t()


def view_element(a, b):
    x = a * 1.5
    row = x[1]
    row[2].mul_(b[3])
    return x.exp() + row


def view_of_view(a, b):
    x = a * 1.5
    columns = x[:, 1:4].t()
    two = columns[0:2]
    two.mul_(b[2:4, None])
    columns.add_(b[0:3, None])
    return torch.cat([x.sin(), two.sin().t()], 1)


def view_two_views(a, b):
    x = a * 1.5
    first, rows = x[0], x[0:2]
    first.mul_(b)
    rows.add_(b.square())
    return first.sin() * rows.exp() + x[2]


def view_chain(a, b):
    x = a * 1.5
    row = x[2]
    row.mul_(b)
    row.add_(b)
    x.mul_(0.5)
    row.div_(b + 3)
    x.mul_(b.exp())
    return x.sin() + row


def view_reshaped(a, b):
    x = a * 1.5
    flat = x.view(2, 6)
    flat[1][1:5].copy_(b.square())
    return x.sin() + flat.exp().view(3, 4)


def view_expanded(a, b):
    row = b * 1.5
    wide = row.expand(3, 4)
    row[1:3].mul_(a[0][1:3])
    return wide.sin() * a


def view_filled(a, b):
    x = torch.full((3, 4), 0.25)
    last = x[2]
    x[0].copy_(a[1])
    x[1].add_(a[2] * b)
    return (x * (last + 1)).sin()


def view_constants(a, b):
    x = a * 1.5 - b
    x[0].fill_(5)
    x[1][3].zero_()
    x[:, 2:4].clamp_(-0.3, 0.4)
    x[:, 0:2].relu_()
    return x.exp() * b


def view_before_and_after(a, b):
    x = a * 1.5
    row = x[1]
    before = row * 3
    x.mul_(b)
    return before * row.sin() + x


def view_own_operand(a, b):
    x = a * 1.5
    x[0].add_(x[1])
    x[1:3].add_(x[0])
    return x.sin() * b


def view_base_gone(a, b):
    kept = (a * 1.5).permute(1, 0)
    kept[:, 0:2].mul_(b[:, None])
    return kept.sin()


def view_squeezed(a, b):
    x = a * 1.5
    row = x[1:2]
    row.squeeze(0).mul_(b)
    x.unsqueeze(1).sub_(b)
    return row.sin() * x


def views():
    a = torch.round(torch.rand(3, 4) * 48) / 32 + 0.5
    b = torch.round(torch.rand(4) * 48) / 32 + 0.5
    for name, function in list(globals().items()):
        if name.startswith("view_"):
            record(name, function, a, b)


def main():
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    for group in (products, pools, activations, norms, attentions, tables):
        group()
    weight = losses()
    views()
    print(f"/* Recorded by record_ops.py with PyTorch {torch.__version__}. */")
    listed = ", ".join(repr(float(v)) for v in weight)
    print(f"static const float recorded_weight[] = {{{listed}}};\n")
    print("static const struct recorded_op recorded_ops[] = {")
    print("\n".join(cases))
    print("};\n")
    print("static const float recorded_numbers[] = {")
    for i in range(0, len(numbers), 12):
        print("    " + " ".join(text_of(v) + "," for v in numbers[i : i + 12]))
    print("};")


def text_of(value):
    if math.isinf(value):
        return "-INFINITY" if value < 0 else "INFINITY"
    return f"{value:.8g}"


main()
