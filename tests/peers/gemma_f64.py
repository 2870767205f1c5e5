#!/usr/bin/env python3
"""Gemma 3 in f64, written as plainly as it can be: what a model's logits are when nothing is rounded.

    python3 tests/peers/gemma_f64.py MODEL REFERENCE OUT

Takes the tokens of the first prompt of REFERENCE, a file of tests/vectors/engine, runs MODEL, a GGUF file, over them and writes the
same case to OUT with numbers of its own. Needs numpy and gguf from PyPI; the weights are read and dequantised by the latter.
"""

import json
import math
import sys

import gguf
import numpy

WINDOW = 512
PATTERN = 6
LOCAL_BASE = 10_000.0
GLOBAL_BASE = 1_000_000.0
EPSILON = 1e-6
TOP_STEPS = 8


class Model:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

        def number(key):
            return int(reader.get_field("gemma3." + key).contents())

        self.layers = number("block_count")
        self.heads = number("attention.head_count")
        self.kv_heads = number("attention.head_count_kv")
        self.head_dim = number("attention.key_length")
        assert number("attention.sliding_window") == WINDOW

    def weights(self, name):
        tensor = self.tensors[name + ".weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    def of_layer(self, layer, name):
        return self.weights(f"blk.{layer}.{name}").astype(numpy.float64)


def norm(x, weights):
    return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weights


def turn(x, base):
    """Each head's first half with its second, by the angles of the positions (the first axis)."""
    half = x.shape[-1] // 2
    angles = numpy.arange(len(x))[:, None] * base ** (-numpy.arange(half) / half)
    cos, sin = numpy.cos(angles)[:, None], numpy.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return numpy.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def attention(model, layer, x):
    count, dim = len(x), model.head_dim
    is_local = (layer + 1) % PATTERN != 0
    base = LOCAL_BASE if is_local else GLOBAL_BASE

    def projected(which, heads):
        return (x @ model.of_layer(layer, "attn_" + which).T).reshape(count, heads, dim)

    queries = turn(norm(projected("q", model.heads), model.of_layer(layer, "attn_q_norm")), base)
    keys = turn(norm(projected("k", model.kv_heads), model.of_layer(layer, "attn_k_norm")), base)
    values = projected("v", model.kv_heads)
    distance = numpy.arange(count)[:, None] - numpy.arange(count)[None]
    seen = (distance >= 0) & ((distance < WINDOW) | (not is_local))
    mixed = numpy.empty_like(queries)
    for head in range(model.heads):
        kv_head = head * model.kv_heads // model.heads
        scores = queries[:, head] @ keys[:, kv_head].T / math.sqrt(dim)
        scores[~seen] = -numpy.inf
        weights = numpy.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ values[:, kv_head]
    return mixed.reshape(count, -1) @ model.of_layer(layer, "attn_output").T


def feed_forward(model, layer, x):
    gate, up = x @ model.of_layer(layer, "ffn_gate").T, x @ model.of_layer(layer, "ffn_up").T
    gelu = 0.5 * gate * (1 + numpy.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gelu * up) @ model.of_layer(layer, "ffn_down").T


def last_rows(model, tokens):
    """What the output projection reads, and that projection."""
    embedding = model.weights("token_embd")
    x = embedding[tokens].astype(numpy.float64) * math.sqrt(embedding.shape[1])
    for layer in range(model.layers):
        out = attention(model, layer, norm(x, model.of_layer(layer, "attn_norm")))
        x = x + norm(out, model.of_layer(layer, "post_attention_norm"))
        out = feed_forward(model, layer, norm(x, model.of_layer(layer, "ffn_norm")))
        x = x + norm(out, model.of_layer(layer, "post_ffw_norm"))
        print(f"layer {layer}", file=sys.stderr, flush=True)
    return norm(x, model.weights("output_norm").astype(numpy.float64)), embedding


def logprobs(row, embedding):
    stretch = 16_384
    parts = [embedding[at : at + stretch].astype(numpy.float64) @ row for at in range(0, len(embedding), stretch)]
    logits = numpy.concatenate(parts)
    peak = logits.max()
    return logits - peak - math.log(numpy.exp(logits - peak).sum())


def top(found):
    best = numpy.argsort(-found, kind="stable")[:5]
    return [[int(token), round(float(found[token]), 6)] for token in best]


def main(path, reference, out):
    with open(reference) as file:
        case = json.load(file)["prompts"][0]
    model = Model(path)
    prompt = len(case["prompt_ids"])
    rows, embedding = last_rows(model, case["prompt_ids"] + case["greedy_ids"][:-1])
    found = [logprobs(row, embedding) for row in rows[prompt - 1 :]]
    case["greedy_logprobs"] = [round(float(f[token]), 6) for f, token in zip(found, case["greedy_ids"])]
    case["top1_top2_margin"] = [round(best[0][1] - best[1][1], 6) for best in map(top, found)]
    case["top5_first8"] = [top(f) for f in found[:TOP_STEPS]]
    case["top5_inside"] = [[known, top(logprobs(rows[known - 1], embedding))] for known, _ in case["top5_inside"]]
    vectors = {
        "label": "gemma-3-270m Q4_K_M dequantised, computed in f64 without a cache",
        "model": "gemma-3-270m-q4_k_m.gguf",
        "engine": "tests/peers/gemma_f64.py",
        "note": "tokens of the run of llama.cpp in f32, numbers of the f64 forward",
        "prompts": [case],
        "chats": [],
    }
    with open(out, "w") as file:
        file.write(json.dumps(vectors, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
