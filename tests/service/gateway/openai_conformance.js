// The official package for JavaScript against the gateway: node openai_conformance.js URL [URL of one whose model has tools].
// Exits with 1 at the first fault.
"use strict";
const assert = require("node:assert/strict");
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused", maxRetries: 0 });
const model = "draftwood-demo";
const messages = [{ role: "user", content: "Where is my parcel?" }];

async function streamed(options) {
  const chunks = [];
  for await (const chunk of await client.chat.completions.create({ ...options, stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
  return chunks;
}

async function main() {
  const options = { model, messages, max_tokens: 40, temperature: 0 };
  const whole = await client.chat.completions.create(options);
  const chunks = await streamed(options);
  const last = chunks.pop(), ended = chunks.pop();
  assert.equal(chunks.map((one) => one.choices[0].delta.content ?? "").join(""), whole.choices[0].message.content);
  assert.ok(chunks.every((one) => one.choices[0].finish_reason === null));
  assert.deepEqual(ended.choices[0].delta, {});
  assert.equal(ended.choices[0].finish_reason, whole.choices[0].finish_reason);
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(whole.metrics.speculative_decoding.mean_acceptance_length >= 1);

  const several = await client.completions.create({ model, prompt: "Your order", n: 2, max_tokens: 6, temperature: 1, seed: 3 });
  assert.deepEqual(several.choices.map((one) => one.index), [0, 1]);
  const detailed = await client.chat.completions.create({ ...options, max_tokens: 4, logprobs: true, top_logprobs: 2 });
  assert.ok(detailed.choices[0].logprobs.content.every((one) => one.top_logprobs.length === 2));
  const schema = { type: "object", properties: { late: { type: "boolean" } }, required: ["late"], additionalProperties: false };
  const json = await client.chat.completions.create({ ...options, response_format: { type: "json_schema", json_schema: { name: "parcel", schema } } });
  assert.deepEqual(Object.keys(JSON.parse(json.choices[0].message.content)), ["late"]);
  const word = whole.choices[0].message.content.split(" ")[4];
  const stopped = await client.chat.completions.create({ ...options, stop: [word] });
  assert.ok(!stopped.choices[0].message.content.includes(word));

  await assert.rejects(client.chat.completions.create({ ...options, temperature: -1 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  await assert.rejects(client.models.retrieve("gpt-9"), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...options, max_completion_tokens: 1e6, max_tokens: undefined }), (error) => error.code === "context_length_exceeded" && error.param === "max_completion_tokens");
  await assert.rejects(client.embeddings.create({ model, input: "x" }), (error) => error instanceof OpenAI.NotFoundError && error.code === "unknown_url");
  const told = await client.chat.completions.create({ ...options, messages: [{ role: "system", content: "You are a helpful assistant." }, ...messages] });
  assert.ok(told.choices[0].message.content);
  const batch = await client.completions.create({ model, prompt: Array.from({ length: 128 }, (_, at) => `Order ${at}`), max_tokens: 2 });
  assert.equal(batch.choices.length, 128);
  const late = client.chat.completions.create({ ...options, max_tokens: 2000, ignore_eos: true, stream: true }, { headers: { "x-draftwood-timeout": "0.3" } });
  await assert.rejects((async () => { for await (const _ of await late); })(), OpenAI.APIError);
  const left = await client.chat.completions.create({ ...options, max_tokens: 2000, ignore_eos: true, stream: true });
  for await (const _ of left) break;
  const many = await Promise.all(Array.from({ length: 64 }, () => streamed({ ...options, max_tokens: 8 })));
  assert.equal(new Set(many.map((chunks) => chunks.map((one) => one.choices[0]?.delta.content ?? "").join(""))).size, 1);
}

async function tools(baseURL) {
  const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: "unused", maxRetries: 0 });
  const parameters = { type: "object", properties: { order: { type: "integer", minimum: 1, maximum: 9999 } }, required: ["order"], additionalProperties: false };
  const options = { model, messages, max_tokens: 120, parallel_tool_calls: false, tools: ["track", "refund"].map((name) => ({ type: "function", function: { name, parameters } })) };
  const named = { ...options, tool_choice: { type: "function", function: { name: "refund" } } };

  const whole = (await client.chat.completions.create(named)).choices[0];
  assert.equal(whole.finish_reason, "tool_calls");
  const [call] = whole.message.tool_calls;
  assert.equal(call.function.name, "refund");
  assert.ok(Number.isInteger(JSON.parse(call.function.arguments).order));

  const streamed = await client.chat.completions.stream(named).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.tool_calls.map((one) => one.function.arguments), [call.function.arguments]);
  assert.equal(streamed.choices[0].finish_reason, "tool_calls");

  const results = [];
  const track = { type: "function", function: { name: "track", parse: JSON.parse, parameters, function: ({ order }) => { results.push(order); return "in Bremen"; } } };
  const runner = client.chat.completions.runTools({ ...options, tools: [track], tool_choice: { type: "function", function: { name: "track" } } });
  await runner.done();
  assert.equal(results.length, 1);
  assert.ok(runner.messages.some((one) => one.role === "tool" && one.content === "in Bremen"));

  const answered = await client.chat.completions.create({ ...options, messages: [...messages, whole.message, { role: "tool", tool_call_id: call.id, content: "done" }] });
  assert.equal(answered.choices[0].message.tool_calls, undefined);
  assert.ok(answered.choices[0].message.content);
  await assert.rejects(client.chat.completions.create({ ...options, tool_choice: { type: "function", function: { name: "other" } } }), (error) => error.param === "tool_choice.function.name");
}

Promise.all([main(), process.argv[3] && tools(process.argv[3])]).catch((error) => { console.error(error); process.exitCode = 1; });
