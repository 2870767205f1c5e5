"""What a server must refuse, sent as bytes. Arguments: API address, admin address.

Each answer is a 4xx with the four keys of OpenAI's error body; afterwards nothing is held, no actor was restarted and
the server still answers."""

import http.client
import json
import socket
import sys
from urllib.parse import urlsplit

from server import Metrics, nothing_is_held
from tap import Suite, arguments, equal, true, wait_until

BASE, ADMIN = arguments("api", "admin")
PLACE = urlsplit(BASE)
LIMIT_S = 120
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

suite = Suite("bad input")


def send(path, body=b"", method="POST", headers=None):
    """(status, headers, body) of one request."""
    connection = http.client.HTTPConnection(PLACE.hostname, PLACE.port, timeout=LIMIT_S)
    try:
        try:
            connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that has seen enough answers before the whole body is sent
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


MODEL = json.loads(send("/v1/models", method="GET")[2])["data"][0]["id"]
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields):
    return {"model": MODEL, "messages": HELLO, "max_tokens": 2, **fields}


def completion(**fields):
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 2, **fields}


def refused(path, body, statuses=(400,), param=None, **how):
    """Sends a body (bytes, or a value as JSON) and checks how it is refused. Returns the error."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    shown = raw[:120]
    status, _, answer = send(path, raw, **how)
    true(status in statuses, f"{shown!r} answered {status}, expected {statuses}: {answer[:300]!r}")
    error = json.loads(answer)["error"]
    true({"message", "type", "param", "code"} <= error.keys(), f"{shown!r}: keys of the error are {sorted(error)}")
    true(error["message"], f"{shown!r}: no message")
    if param:
        # The path of what is wrong: `prompt`, or `prompt[0]`.
        named = error["param"] == param or str(error["param"]).startswith((f"{param}[", f"{param}."))
        true(named, f"{shown!r}: param {error['param']!r}, expected {param!r}: {error['message']}")
    return error


def restarts():
    return sum(value for _, value in Metrics(ADMIN).values("starling_actor_restarts_total"))


RESTARTS = restarts()


@suite.check
def bodies_that_are_not_json():
    for body in (b"", b"{", b'{"model": ', b"nonsense", b"{'model': 1}", b"\x00\x01", b'{"a": NaN}', b'{"a": 1e999}', b"1" * 400):
        refused(CHAT, body)
        refused(COMPLETIONS, body)


@suite.check
def bodies_that_are_not_objects():
    for body in (None, [], [chat()], "text", 7, True, 1.5):
        refused(CHAT, body)
        refused(COMPLETIONS, body)
        refused("/tokenize", body)
        refused("/detokenize", body)


@suite.check
def bytes_that_are_not_utf8():
    body = json.dumps(chat()).encode()
    for bad in (b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"):
        refused(CHAT, body.replace(b"Hello", bad))
    refused(CHAT, body.replace(b"Hello", b"\\ud800"))


@suite.check
def a_body_over_the_limit():
    refused(CHAT, chat(messages=[{"role": "user", "content": "x" * 10_000_000}]), statuses=(413,))


@suite.check
def brackets_nested_without_end():
    for opening in (b"[", b'{"a":'):
        refused(CHAT, opening * 200_000)
        refused(CHAT, b'{"messages":' + opening * 200_000)


@suite.check
def messages_of_the_wrong_form():
    for messages in (None, "Hello", {}, 5, [], [1], ["Hello"], [[]], [None], [{}], [{"role": "user"}]):
        refused(CHAT, chat(messages=messages))
    for message in (
        {"content": "Hello"},
        {"role": "wizard", "content": "Hello"},
        {"role": 1, "content": "Hello"},
        {"role": "user", "content": 5},
        {"role": "user", "content": {}},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]},
    ):
        refused(CHAT, chat(messages=[message]))
    refused(CHAT, {"model": MODEL})


@suite.check
def a_model_that_is_not_there():
    refused(CHAT, chat(model="no-such-model"), statuses=(404,), param="model")
    refused(COMPLETIONS, completion(model="no-such-model"), statuses=(404,), param="model")
    for model in (5, [], {}):
        refused(CHAT, chat(model=model))
    refused("/v1/models/no-such-model", b"", statuses=(404,), method="GET")


@suite.check
def numbers_out_of_their_range():
    ranges = {
        "max_tokens": (-1, 1.5, -(10**30), 10**30, "5", [5], {}, True),
        "temperature": (-0.1, 9, "hot", [], 10**30),
        "top_p": (-0.1, 2, "x", []),
        "top_k": ("x", 1.5, []),
        "seed": ("x", 2**70, 1.5, []),
        "n": (-1, 0, 100_000, "x", 1.5),
        "min_tokens": (-1, 1.5, "x", 10**30),
        "min_p": (-0.1, 1.1, "x", []),
        "repetition_penalty": (0, -1, 10**30, "x"),
        "presence_penalty": (-2.1, 2.1, "x", {}),
        "frequency_penalty": (-2.1, 2.1, "x", True),
    }
    for param, values in ranges.items():
        for value in values:
            refused(CHAT, chat(**{param: value}), param=param)
            refused(COMPLETIONS, completion(**{param: value}), param=param)


@suite.check
def fields_of_the_wrong_type():
    for param, value in (
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", 5),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", {"a": "b"}),
        ("tools", 5),
        ("response_format", 5),
    ):
        refused(CHAT, chat(**{param: value}), param=param)


@suite.check
def biases_and_log_probabilities_that_cannot_be():
    for bias in ({"x": 1}, {"-1": 1}, {"05": 1}, {"5": 101}, {"5": "1"}, {"5": None}, {str(2**31): 1}, {"9" * 30: 1}, [], 5):
        refused(CHAT, chat(logit_bias=bias), param="logit_bias")
        refused(COMPLETIONS, completion(logit_bias=bias), param="logit_bias")
    refused(CHAT, chat(logit_bias={str(token): 1 for token in range(301)}), param="logit_bias")
    for top in (-1, 21, 1.5, "x"):
        refused(CHAT, chat(logprobs=True, top_logprobs=top), param="top_logprobs")
        refused(COMPLETIONS, completion(logprobs=top), param="logprobs")
    refused(CHAT, chat(top_logprobs=3), param="top_logprobs")
    refused(COMPLETIONS, completion(n=2, best_of=3), param="best_of")


@suite.check
def a_prompt_over_the_context():
    error = refused(CHAT, chat(messages=[{"role": "user", "content": "word " * 40_000}]))
    true(any(digit.isdigit() for digit in error["message"]), f"no number in {error['message']!r}")
    refused(COMPLETIONS, completion(prompt="word " * 40_000))


@suite.check
def prompts_of_the_wrong_form():
    for prompt in (5, {}, [], "", [-1], [2**32 - 1], [2**40], [1.5], [None], True):
        refused(COMPLETIONS, completion(prompt=prompt), param="prompt")


@suite.check
def tokens_that_are_not_in_the_vocabulary():
    for tokens in ([-1], [2**32 - 1], [2**40], ["a"], 5, None, [1.5]):
        refused("/detokenize", {"model": MODEL, "tokens": tokens})
    for text in (5, [5], {}):
        refused("/tokenize", {"model": MODEL, "prompt": text})


@suite.check
def paths_and_methods_that_are_not_there():
    refused("/v1/no-such-path", b"", statuses=(404,), method="GET")
    refused("/v1/no-such-path", chat(), statuses=(404,))
    status, _, _ = send(CHAT, method="GET")
    equal(status, 405, "GET of the chat path")
    status, _, _ = send(CHAT, method="DELETE")
    equal(status, 405, "DELETE of the chat path")


@suite.check
def bytes_that_are_not_http():
    whole = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % CHAT.encode()
    for raw in (
        b"\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        whole + b"x-large: " + b"x" * 600_000 + b"\r\n\r\n",
        whole + b"content-length: -1\r\n\r\n{}",
        whole + b"content-length: 99999999999999999999999\r\n\r\n{}",
        # Says more than it sends, then leaves.
        whole + b"content-length: 1000\r\n\r\n{",
        whole + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        whole + b"transfer-encoding: chunked\r\n\r\nff\r\n{",
    ):
        with socket.create_connection((PLACE.hostname, PLACE.port), timeout=LIMIT_S) as connection:
            try:
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
            except (ConnectionResetError, BrokenPipeError):
                continue  # refusing to listen is an answer
            if answer:
                true(answer.startswith(b"HTTP/1.1 4"), f"{raw[:60]!r} answered {answer[:80]!r}")


@suite.check
def headers_with_odd_bytes_do_no_harm():
    for value in (b"\xff\xfe", b"x" * 4000, b"\xc3\xa4", b""):
        raw = json.dumps(chat()).encode()
        headers = {"x-starling-conversation": value, "x-request-id": value, "traceparent": value}
        status, _, answer = send(CHAT, raw, headers=headers)
        true(status < 500, f"{value[:20]!r} answered {status}: {answer[:200]!r}")


@suite.check
def the_server_still_answers_and_nothing_is_held():
    status, _, answer = send(CHAT, json.dumps(chat()).encode())
    equal(status, 200, f"status ({answer[:200]!r})")
    wait_until(lambda: nothing_is_held(ADMIN), "free + reusable = total on every rank")
    equal(restarts(), RESTARTS, "restarts of actors")


sys.exit(suite.run())
