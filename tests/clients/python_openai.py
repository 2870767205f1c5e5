"""The openai package for Python against a running server. Arguments: API address, admin address, engine."""

import asyncio
import sys

import openai
from openai import AsyncOpenAI, OpenAI

from server import Metrics, nothing_is_held
from tap import Suite, arguments, equal, true, wait_until, wait_until_async

BASE, ADMIN, ENGINE = arguments("api", "admin", "engine")
KEYS = {"base_url": f"{BASE}/v1", "api_key": "none", "max_retries": 0, "timeout": 600}
CLIENT = OpenAI(**KEYS)
MODEL = CLIENT.models.list().data[0].id
# The exact engine on two slow cores computes some tens of tokens a second; the timed one computes nothing.
STREAMS, STREAM_TOKENS = (50, 16) if ENGINE == "timed" else (50, 2)

suite = Suite(f"openai {openai.__version__} for Python, engine {ENGINE}")


def user(text):
    return [{"role": "user", "content": text}]


def refused(error_type, **request):
    """The error that a request meets."""
    try:
        CLIENT.chat.completions.create(**{"model": MODEL, "messages": user("Hello"), **request})
    except error_type as error:
        return error
    raise AssertionError(f"{request} was not refused with {error_type.__name__}")


@suite.check
def models_are_listed_and_found_by_id():
    models = CLIENT.models.list().data
    equal(len(models), 1, "models")
    equal(models[0].object, "model", "object")
    equal(CLIENT.models.retrieve(MODEL).id, MODEL, "id")


@suite.check
def an_unknown_model_is_not_found():
    try:
        CLIENT.models.retrieve("no-such-model")
        raise AssertionError("the model was found")
    except openai.NotFoundError:
        pass
    error = refused(openai.NotFoundError, model="no-such-model")
    true("no-such-model" in str(error), f"the message does not name the model: {error}")
    equal(error.param, "model", "param")


@suite.check
def a_chat_is_answered():
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=user("Tell me the capital of France."), max_tokens=12, temperature=0
    )
    equal(answer.object, "chat.completion", "object")
    choice = answer.choices[0]
    equal(choice.message.role, "assistant", "role")
    true(choice.message.content, "no content")
    true(choice.finish_reason in ("stop", "length"), f"finish_reason {choice.finish_reason!r}")
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens, "total tokens")
    true(0 < answer.usage.completion_tokens <= 12, f"{answer.usage.completion_tokens} tokens")
    if ENGINE == "cpu":
        true("Paris" in choice.message.content, f"the model says {choice.message.content!r}")


@suite.check
def the_same_request_has_the_same_answer():
    def ask(**sampling):
        answer = CLIENT.chat.completions.create(
            model=MODEL, messages=user("Name three colours."), max_tokens=8, **sampling
        )
        return answer.choices[0].message.content

    equal(ask(temperature=0), ask(temperature=0), "greedy")
    equal(ask(temperature=0.8, seed=7), ask(temperature=0.8, seed=7), "seed 7")


def stream_turn(messages, headers=None, max_tokens=12):
    """(text, finish reason, usage) of one streamed answer."""
    text, finish, usage = "", None, None
    stream = CLIENT.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=headers,
    )
    for chunk in stream:
        if chunk.choices:
            true(usage is None, "a choice after the usage")
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        else:
            true(usage is None, "two chunks with usage")
            usage = chunk.usage
    true(usage is not None, "no chunk with usage")
    true(finish is not None, "no finish reason")
    return text, finish, usage


@suite.check
def a_stream_says_what_the_whole_answer_says():
    messages = user("Count from one to ten.")
    text, finish, usage = stream_turn(messages)
    whole = CLIENT.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    equal(text, whole.choices[0].message.content, "text")
    equal(finish, whole.choices[0].finish_reason, "finish reason")
    equal(usage.completion_tokens, whole.usage.completion_tokens, "completion tokens")
    equal(usage.prompt_tokens, whole.usage.prompt_tokens, "prompt tokens")


@suite.check
def cached_tokens_grow_over_a_conversation():
    messages, cached = [], []
    for text in ("Tell me about rivers in one sentence.", "Tell me more about them.", "And where do they end?"):
        messages += user(text)
        answer, _, usage = stream_turn(messages, {"x-starling-conversation": "three-turns"}, max_tokens=20)
        messages.append({"role": "assistant", "content": answer})
        cached.append(usage.prompt_tokens_details.cached_tokens)
        true(cached[-1] < usage.prompt_tokens, f"{cached[-1]} of {usage.prompt_tokens} prompt tokens are cached")
    true(cached[0] < cached[1] < cached[2], f"cached tokens by turn: {cached}")


@suite.check
def a_completion_is_answered():
    answer = CLIENT.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0)
    equal(answer.object, "text_completion", "object")
    true(answer.choices[0].text, "no text")
    true(answer.usage.completion_tokens <= 5, f"{answer.usage.completion_tokens} tokens")
    chunks = CLIENT.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0, stream=True)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    equal(text, answer.choices[0].text, "streamed text")


@suite.check
def a_stop_string_ends_the_answer_and_is_not_in_it():
    whole = CLIENT.completions.create(model=MODEL, prompt="One two three", max_tokens=8, temperature=0)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    true(stop, f"the model says {text!r}")
    cut = CLIENT.completions.create(model=MODEL, prompt="One two three", max_tokens=8, temperature=0, stop=[stop])
    equal(cut.choices[0].text, text[: text.index(stop)], "text before the stop string")
    equal(cut.choices[0].finish_reason, "stop", "finish reason")


@suite.check
def choices_come_under_their_index_and_share_the_prompt():
    asked = {"model": MODEL, "messages": user("Name a colour and an animal that has it."), "max_tokens": 8}
    asked |= {"temperature": 1.2, "seed": 3}
    whole = CLIENT.chat.completions.create(**asked, n=3)
    equal([choice.index for choice in whole.choices], [0, 1, 2], "indices")
    alone = CLIENT.chat.completions.create(**asked)
    equal(whole.choices[0].message.content, alone.choices[0].message.content, "the first choice")
    equal(whole.usage.prompt_tokens, alone.usage.prompt_tokens, "prompt tokens")
    texts, ends = [""] * 3, [None] * 3
    for chunk in CLIENT.chat.completions.create(**asked, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    equal(texts, [choice.message.content for choice in whole.choices], "streamed texts")
    equal(ends, [choice.finish_reason for choice in whole.choices], "finish reasons")


@suite.check
def log_probabilities_are_told_of_each_token():
    asked = {"model": MODEL, "messages": user("Count to five."), "max_tokens": 6, "temperature": 0}
    answer = CLIENT.chat.completions.create(**asked, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    said = b"".join(bytes(token.bytes) for token in content).decode(errors="replace")
    equal(said, answer.choices[0].message.content, "tokens")
    for token in content:
        equal(len(token.top_logprobs), 4, "alternatives")
        true(all(other.logprob <= token.top_logprobs[0].logprob <= 0 for other in token.top_logprobs), f"{token}")
        equal(bytes(token.bytes).decode(errors="replace"), token.token, "bytes")
    streamed = []
    for chunk in CLIENT.chat.completions.create(**asked, logprobs=True, top_logprobs=4, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    equal(streamed, content, "streamed")
    told = CLIENT.completions.create(model=MODEL, prompt="One two three", max_tokens=5, temperature=0, logprobs=2)
    text, logprobs = told.choices[0].text, told.choices[0].logprobs
    # What the timed engine says is cut anywhere, also within characters.
    if ENGINE == "cpu":
        equal("".join(logprobs.tokens), text, "tokens of a completion")
        placed = zip(logprobs.text_offset, logprobs.tokens)
        true(all(text[at:].startswith(token) for at, token in placed), f"offsets {logprobs.text_offset}")
    true(all(2 <= len(top) <= 3 for top in logprobs.top_logprobs), f"{logprobs.top_logprobs}")


@suite.check
def the_same_penalties_and_biases_give_the_same_answer():
    def ask(**more):
        answer = CLIENT.chat.completions.create(
            model=MODEL, messages=user("Say the word tree again and again."), max_tokens=10, temperature=0.7, seed=5, **more
        )
        return answer.choices[0].message.content

    for more in (
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"extra_body": {"repetition_penalty": 1.5, "min_p": 0.1}},
        {"logit_bias": {"100": 5}},
    ):
        equal(ask(**more), ask(**more), f"the same with {more}")


@suite.check
def a_wrong_value_is_refused_with_the_name_of_its_parameter():
    equal(refused(openai.BadRequestError, max_tokens=-1).param, "max_tokens", "param")
    equal(refused(openai.BadRequestError, temperature=9).param, "temperature", "param")
    equal(refused(openai.BadRequestError, top_p=2).param, "top_p", "param")
    equal(refused(openai.BadRequestError, messages=[]).param, "messages", "param")
    equal(refused(openai.BadRequestError, stop=["a", "b", "c", "d", "e"]).param, "stop", "param")


@suite.check
async def concurrent_streams_all_complete():
    async with AsyncOpenAI(**KEYS) as client:

        async def one(number):
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=user(f"Say something about the number {number}."),
                max_tokens=STREAM_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-session-id": f"session-{number % 10}"},
            )
            finish, usage = None, None
            async for chunk in stream:
                if chunk.choices:
                    finish = chunk.choices[0].finish_reason or finish
                usage = chunk.usage or usage
            return finish, usage.completion_tokens

        ends = await asyncio.gather(*(one(number) for number in range(STREAMS)))
    for finish, tokens in ends:
        if finish == "length":
            equal(tokens, STREAM_TOKENS, "tokens of a stream that ran to its length")
        else:
            true(finish == "stop" and 0 < tokens <= STREAM_TOKENS, f"a stream ended by {finish!r} with {tokens} tokens")
    equal(len(ends), STREAMS, "streams")


async def cancels(leave, max_tokens, prompt):
    """Starts a stream, lets `leave` walk away from it, and checks that the rank forgets it within a step."""
    await wait_until_async(lambda: nothing_is_held(ADMIN), "no block held before")
    before = Metrics(ADMIN).sum("starling_cancels_total")
    async with AsyncOpenAI(**KEYS) as client:
        await leave(
            lambda: client.chat.completions.create(
                model=MODEL, messages=user(prompt), max_tokens=max_tokens, stream=True
            )
        )
    await wait_until_async(lambda: nothing_is_held(ADMIN), "free + reusable = total on every rank")
    await wait_until_async(lambda: Metrics(ADMIN).sum("starling_cancels_total") > before, "a counted cancel")
    steps = Metrics(ADMIN).max("starling_cancel_steps_max")
    true(steps <= 1, f"{steps} steps from a cancel to the release of its blocks")


@suite.check
async def a_stream_that_is_cut_frees_its_blocks_within_a_step():
    async def leave(start):
        stream = await start()
        seen = 0
        async for chunk in stream:
            seen += bool(chunk.choices and chunk.choices[0].delta.content)
            if seen == 3:
                break
        equal(seen, 3, "pieces before the cut")
        await stream.close()

    # Long enough that it cannot end by itself before the cut.
    await cancels(leave, 400, "Write a very long story about the sea.")


@suite.check
async def a_client_that_leaves_during_prefill_frees_its_blocks_within_a_step():
    async def leave(start):
        request = asyncio.create_task(start())
        await wait_until_async(lambda: Metrics(ADMIN).sum("starling_kv_blocks", state="held") > 0, "a block held")
        request.cancel()
        try:
            stream = await request
        except asyncio.CancelledError:
            return
        await stream.close()

    # Slow to prefill on either engine: seconds, while the first block is held at once.
    await cancels(leave, 400, "word " * 900)


@suite.check
async def a_client_that_leaves_a_whole_answer_frees_its_blocks_within_a_step():
    async def leave(_):
        async with AsyncOpenAI(**KEYS) as client:
            messages = user("Write a very long story about a ship.")
            request = asyncio.create_task(
                client.chat.completions.create(model=MODEL, messages=messages, max_tokens=400)
            )
            await wait_until_async(lambda: Metrics(ADMIN).sum("starling_kv_blocks", state="held") > 0, "a block held")
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    await cancels(leave, 400, "")


@suite.check
async def many_clients_that_leave_at_once_leave_nothing_behind():
    async def leave(start):
        async def one(pieces):
            stream = await start()
            async for chunk in stream:
                pieces -= bool(chunk.choices and chunk.choices[0].delta.content)
                if pieces <= 0:
                    break
            await stream.close()

        await asyncio.gather(*(one(number % 4) for number in range(20 if ENGINE == "timed" else 6)))

    await cancels(leave, 400, "Write a very long story about a mountain.")


@suite.check
def nothing_is_held_at_the_end():
    wait_until(lambda: nothing_is_held(ADMIN), "free + reusable = total on every rank")


sys.exit(suite.run())
