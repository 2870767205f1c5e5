// The openai package for JavaScript against a running server. Arguments: API address, admin address, engine.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [base, admin, engine] = process.argv.slice(2);
assert.ok(engine, "usage: npm_openai.mjs API ADMIN ENGINE");

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0, timeout: 600_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Name a fruit." }];
const ask = (request) => client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, ...request });

async function pieces(stream) {
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

// The value of a metric, summed over its series.
async function metric(name, label = "") {
  const lines = (await (await fetch(`${admin}/metrics`)).text()).split("\n");
  const found = lines.filter((line) => (line.startsWith(`${name}{`) || line.startsWith(`${name} `)) && line.includes(label));
  assert.ok(found.length > 0, `no metric ${name} ${label}`);
  return found.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" "))), 0);
}

async function waitUntil(probe, what) {
  const deadline = Date.now() + 120_000;
  while (!(await probe())) {
    assert.ok(Date.now() < deadline, `waited 120 s for ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

const checks = {
  "a model is found by its id": async () => {
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  "a stream says what the whole answer says": async () => {
    const whole = await ask({});
    const streamed = await pieces(await ask({ stream: true, stream_options: { include_usage: true } }));
    assert.equal(streamed.text, whole.choices[0].message.content);
    assert.equal(streamed.usage.completion_tokens, whole.usage.completion_tokens);
    assert.equal(typeof streamed.usage.prompt_tokens_details.cached_tokens, "number");
  },
  "a completion is answered": async () => {
    const answer = await client.completions.create({ model, prompt: "One, two,", max_tokens: 4, temperature: 0 });
    assert.equal(answer.object, "text_completion");
    assert.ok(answer.usage.completion_tokens <= 4);
  },
  "a wrong value is refused with the name of its parameter": async () => {
    await assert.rejects(ask({ max_tokens: -1 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "max_tokens");
  },
  "an unknown model is not found": async () => {
    await assert.rejects(ask({ model: "no-such-model" }), OpenAI.NotFoundError);
  },
  "streams run side by side": async () => {
    const streams = Array.from({ length: 20 }, async () =>
      pieces(await ask({ max_tokens: 4, stream: true, stream_options: { include_usage: true } })),
    );
    const ends = await Promise.all(streams);
    assert.equal(new Set(ends.map((end) => end.text)).size, 1, "greedy answers to one question differ");
  },
  "an aborted stream frees its blocks": async () => {
    const before = await metric("starling_cancels_total");
    const stream = await ask({ max_tokens: 400, stream: true, messages: [{ role: "user", content: "Write a long story." }] });
    for await (const chunk of stream) {
      if (chunk.choices[0]?.delta?.content) break;
    }
    stream.controller.abort();
    await waitUntil(async () => (await metric("starling_cancels_total")) > before, "a counted cancel");
    await waitUntil(async () => (await metric("starling_kv_blocks", 'state="held"')) === 0, "no block held");
  },
};

console.log(`# openai for JavaScript on node ${process.version}, engine ${engine}`);
let failed = 0;
for (const [index, [name, check]] of Object.entries(checks).entries()) {
  let verdict = "ok";
  try {
    await check();
  } catch (error) {
    verdict = "not ok";
    failed += 1;
    console.log(String(error.stack ?? error).replaceAll(/^/gm, "#   "));
  }
  console.log(`${verdict} ${index + 1} - ${name}`);
}
console.log(`${Object.keys(checks).length - failed} passed, ${failed} failed`);
process.exit(failed === 0 ? 0 : 1);
