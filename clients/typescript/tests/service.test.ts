/** A running service with the bundled model, at DRAFTWOOD_TARGET; `make test` starts one. */

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Client, InvalidRequestError, NotFoundError } from "draftwood-client";

const target = process.env.DRAFTWOOD_TARGET;
const skip = target === undefined && "DRAFTWOOD_TARGET names no service";
const QUESTION = [{ role: "user", content: "where is my order?" }];

let client: Client;

before(() => {
  client = new Client(target, { tenant: "typescript", timeoutMs: 60_000 });
});

after(() => client.close());

test("the second answer of a question is drafted, and is the same", { skip }, async () => {
  const model = await client.waitUntilReady();
  assert.equal(model.model, "draftwood-demo");
  assert.ok(model.strategies.includes("trie") && model.hasChatTemplate && model.parameters > 1_000_000);
  const plain = await client.generate(QUESTION, { maxTokens: 60, drafting: false });
  assert.equal(plain.drafting.strategy, "none");
  await client.generate(QUESTION, { maxTokens: 60, strategy: "trie" });
  const drafted = await client.generate(QUESTION, { maxTokens: 60, strategy: "trie", tokenDetails: true });
  assert.equal(drafted.text, plain.text);
  assert.deepEqual(drafted.tokenIds, plain.tokenIds);
  assert.ok(drafted.drafting.meanAcceptanceLength > 2, `${drafted.drafting.meanAcceptanceLength} tokens a step`);
  assert.equal(drafted.details.filter((one) => one.drafted).length, drafted.drafting.acceptedTokens);
  assert.equal(drafted.tenant, "typescript");
});

test("a stream writes what generate returns", { skip }, async () => {
  const stream = client.stream(QUESTION, { maxTokens: 30, requestId: "r-1", strategy: "recycling", draftTrees: true });
  let text = "";
  let accepted = 0;
  for await (const delta of stream) {
    text += delta.text;
    for (const { tokens, tokenIds, parents, accepted: path } of delta.draftTrees) {
      assert.ok(tokens.length === tokenIds.length && parents.every((parent, node) => parent >= -1 && parent < node));
      accepted += path.length;
    }
  }
  assert.equal(accepted, (await stream.completion()).drafting.acceptedTokens);
  const completion = await stream.completion();
  assert.equal(text, completion.text);
  assert.equal(completion.requestId, "r-1");
  assert.equal(completion.finishReason, "length");
  assert.equal(completion.usage.completionTokens, 30);
});

test("samples have seeds of 64 bits, each of which gives its sample alone", { skip }, async () => {
  const seed = 2n ** 63n + 1n;
  const options = { temperature: 1, maxTokens: 20 };
  const { samples } = await client.generate("Dear customer,", { ...options, seed, n: 3 });
  assert.deepEqual(
    samples.map((one) => one.seed),
    [seed, seed + 1n, seed + 2n],
  );
  const alone = await client.generate("Dear customer,", { ...options, seed: seed + 2n });
  assert.equal(alone.text, samples[2]?.text);
});

test("formats, stops and log-probabilities", { skip }, async () => {
  const digits = await client.generate("The order number is ", { regex: "[0-9]{4}" });
  assert.match(digits.text, /^[0-9]{4}$/);
  const jsonSchema = {
    type: "object",
    properties: { ok: { type: "boolean" } },
    required: ["ok"],
    additionalProperties: false,
  };
  const json = await client.generate("Is it so? ", { jsonSchema, maxTokens: 60 });
  assert.equal(typeof JSON.parse(json.text).ok, "boolean");
  const stopped = await client.generate(QUESTION, { stop: [" "] });
  assert.deepEqual([stopped.matchedStop, stopped.finishReason], [" ", "stop"]);
  const [detail] = (await client.generate(QUESTION, { maxTokens: 1, topLogprobs: 2 })).details;
  assert.equal(detail?.topLogprobs[0]?.logprob, detail?.logprob);
  assert.equal(detail?.topLogprobs.length, 2);
});

test("tokens there and back", { skip }, async () => {
  const { tokenIds, tokens } = await client.tokenize("where is my order?");
  assert.equal(tokens.length, tokenIds.length);
  assert.equal(await client.detokenize(tokenIds), "where is my order?");
  const continued = await client.generate(tokenIds, { maxTokens: 5 });
  assert.equal(continued.text, (await client.generate("where is my order?", { maxTokens: 5 })).text);
});

test("a request that is left early frees its slot", { skip }, async () => {
  for (let i = 0; i < 20; i += 1) {
    for await (const _ of client.stream(QUESTION, { ignoreEos: true })) {
      break;
    }
  }
  assert.equal((await client.generate(QUESTION, { maxTokens: 3 })).tokenIds.length, 3);
});

test("errors of the service", { skip }, async () => {
  await assert.rejects(client.generate("x", { temperature: -1 }), (error) => {
    assert.ok(error instanceof InvalidRequestError);
    assert.equal(error.violations[0]?.field, "sampling.temperature");
    assert.match(error.message, /^sampling\.temperature: -1/);
    assert.notEqual(error.reason, "");
    return true;
  });
  await assert.rejects(client.generate("x", { model: "other" }), NotFoundError);
});
