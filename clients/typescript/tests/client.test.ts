/** Requests, streams, cancelling and errors, against a scripted server. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { afterEach, beforeEach, test } from "node:test";
import { status } from "@grpc/grpc-js";
import {
  Client,
  ClientClosedError,
  DeadlineError,
  InternalError,
  InvalidRequestError,
  NO_RETRY,
  QuotaExceededError,
  RequestCancelledError,
  StatusError,
  UnavailableError,
} from "draftwood-client";
import {
  answers,
  FakeServer,
  fails,
  hangs,
  quota,
  reason,
  retryIn,
  silent,
  unfinished,
  violation,
} from "./fake-server.js";

let server: FakeServer;
let client: Client;

beforeEach(async () => {
  server = await FakeServer.start();
  client = new Client(server.target, { tenant: "acme", retry: NO_RETRY });
});

afterEach(() => {
  client.close();
  server.stop();
});

test("a whole answer, with seeds of 64 bits", async () => {
  const completion = await client.generate("Dear customer,", { seed: 2n ** 64n - 1n, maxTokens: 0 });
  assert.equal(completion.text, "It is here.");
  assert.deepEqual(completion.tokenIds, [5, 6]);
  assert.equal(completion.seed, 2n ** 64n - 1n);
  assert.equal(completion.finishReason, "stop");
  assert.deepEqual(completion.timings, { queueMs: 250, prefillMs: 0, decodeMs: 1000.5 });
  assert.deepEqual(completion.drafting.bySource, { trie: { draftTokens: 8, acceptedTokens: 0 } });
  const [request] = server.requests;
  assert.equal(request?.tenant, "acme");
  assert.equal(request?.sampling?.seed, 2n ** 64n - 1n);
  assert.equal(request?.stop?.maxTokens, 0);
  assert.equal(completion.requestId, request?.requestId);
  assert.match(completion.requestId, /^[0-9a-f]{32}$/);
});

test("a stream yields deltas, then has the whole answer", async () => {
  const stream = client.stream([{ role: "user", content: "hi" }]);
  assert.equal(typeof stream.started, "undefined");
  const texts: string[] = [];
  for await (const delta of stream) {
    assert.equal(stream.started?.model, "fake");
    texts.push(delta.text);
  }
  assert.deepEqual(texts, ["It is", " here."]);
  assert.equal(stream.finished?.reason, "stop");
  assert.equal((await stream.completion()).text, "It is here.");
  assert.equal(server.requests[0]?.prompt.case, "chat");
});

test("tools, calls and results are in the request", async () => {
  const called = { id: "1", name: "track", arguments: '{"order":7}' };
  await client.generate(
    [
      { role: "user", content: "hi" },
      { role: "assistant", content: "", toolCalls: [called] },
      { role: "tool", content: "in Bremen", toolCallId: "1", toolName: "track" },
    ],
    { tools: [{ name: "track", parameters: { type: "object" } }] },
  );
  const prompt = server.requests[0]?.prompt;
  assert.ok(prompt?.case === "chat");
  const { messages, tools } = prompt.value;
  assert.deepEqual(
    tools.map((one) => [one.name, one.description, one.parameters]),
    [["track", "", '{"type":"object"}']],
  );
  assert.equal(messages[1]?.toolCalls[0]?.arguments, called.arguments);
  assert.deepEqual([messages[2]?.role, messages[2]?.toolCallId, messages[2]?.toolName], ["tool", "1", "track"]);
});

test("leaving the loop cancels the request on the server", async () => {
  server.script = [hangs("a", "b")];
  const cancelled = server.cancelled();
  const stream = client.stream("x");
  for await (const delta of stream) {
    assert.equal(delta.text, "a");
    break;
  }
  await cancelled;
  await assert.rejects(stream.completion(), RequestCancelledError);
});

test("a signal cancels the request, and is the cause of its error", async () => {
  server.script = [silent];
  const controller = new AbortController();
  const cancelled = server.cancelled();
  server.events.on("request", () => controller.abort("enough"));
  await assert.rejects(client.generate("x", { signal: controller.signal }), (error) => {
    assert.ok(error instanceof RequestCancelledError);
    assert.equal(error.cause, "enough");
    assert.equal(error.requestId, server.requests[0]?.requestId);
    return true;
  });
  await cancelled;
  await assert.rejects(client.tokenize("x", { signal: controller.signal }), RequestCancelledError);
  await assert.rejects(client.generate("x", { signal: controller.signal }), RequestCancelledError);
  assert.equal(server.requests.length, 1);
});

test("an error that nobody awaits yet is kept, and no unhandled rejection", async () => {
  server.script = [fails({ code: status.INTERNAL, message: "oh", details: [reason("BUG")], after: ["a", "b"] })];
  const stream = client.stream("x");
  assert.equal((await stream.next()).value?.text, "a");
  await new Promise((resolve) => setTimeout(resolve, 100));
  assert.equal((await stream.next()).value?.text, "b");
  await assert.rejects(stream.next(), InternalError);
  await assert.rejects(stream.completion(), InternalError);
});

test("errors have the details of the server", async () => {
  const details = [reason("INVALID_VALUE", { request_id: "r-1" }), violation("sampling.temperature", "-1 is too low")];
  server.script = [fails({ code: status.INVALID_ARGUMENT, message: "sampling.temperature: -1", details })];
  await assert.rejects(client.generate("x"), (error) => {
    assert.ok(error instanceof InvalidRequestError && error instanceof StatusError);
    assert.equal(error.name, "InvalidRequestError");
    assert.equal(error.message, "sampling.temperature: -1");
    assert.equal(error.code, "INVALID_ARGUMENT");
    assert.equal(error.reason, "INVALID_VALUE");
    assert.equal(error.requestId, "r-1");
    assert.equal(error.retryable, false);
    assert.deepEqual(error.violations, [{ field: "sampling.temperature", description: "-1 is too low" }]);
    return true;
  });
});

test("a rate limit is its own error", async () => {
  const details = [reason("RATE_LIMIT"), quota("tenants/acme", "10 requests a minute"), retryIn(2500)];
  server.script = [fails({ code: status.RESOURCE_EXHAUSTED, message: "too many", details })];
  await assert.rejects(client.generate("x"), (error) => {
    assert.ok(error instanceof QuotaExceededError);
    assert.deepEqual([error.retryAfterMs, error.retryable], [2500, true]);
    assert.deepEqual(error.violations, [{ field: "tenants/acme", description: "10 requests a minute" }]);
    return true;
  });
});

test("details that cannot be decoded are ignored", async () => {
  const broken = { ...reason("X"), value: new Uint8Array([255, 255, 255]) };
  server.script = [fails({ code: status.NOT_FOUND, message: "no", details: [broken] })];
  await assert.rejects(client.generate("x"), { code: "NOT_FOUND", reason: "", message: `${server.target}: no` });
});

test("a stream that ends too early is an error", async () => {
  server.script = [unfinished];
  await assert.rejects(client.generate("x"), { name: "InternalError", message: /without Finished/ });
});

test("a deadline, of the client and of a request", async () => {
  server.script = [silent];
  const message = `${server.target}: no complete answer within 0.05 s`;
  await assert.rejects(client.generate("x", { timeoutMs: 50 }), { name: "DeadlineError", message });
  const hasty = new Client(server.target, { timeoutMs: 50 });
  await assert.rejects(hasty.generate("x"), DeadlineError);
  hasty.close();
});

test("many at once", async () => {
  const all = await Promise.all(Array.from({ length: 64 }, (_, i) => client.generate("x", { requestId: `r${i}` })));
  assert.deepEqual(
    all.map((one) => one.requestId),
    Array.from({ length: 64 }, (_, i) => `r${i}`),
  );
});

test("tokens and the model", async () => {
  assert.deepEqual(await client.tokenize("hi"), { tokenIds: [104, 105], tokens: ["h", "i"] });
  assert.equal(await client.detokenize([104, 105]), "hi");
  assert.equal((await client.modelInfo()).parameters, 6_000_000);
});

test("waits for a server that loads its model", async () => {
  server.unavailableCalls = 2;
  assert.equal((await client.waitUntilReady({ timeoutMs: 30_000 })).model, "fake");
  server.unavailableCalls = 1000;
  const message = /was not ready within 0\.3 s: .*the model is loading/;
  await assert.rejects(client.waitUntilReady({ timeoutMs: 300 }), { name: "DeadlineError", message });
});

test("a closed client", async () => {
  server.script = [hangs("a")];
  const stream = client.stream("x");
  await stream.next();
  const cancelled = once(server.events, "cancelled");
  client.close();
  client.close();
  await assert.rejects(client.generate("x"), ClientClosedError);
  await assert.rejects(client.modelInfo(), ClientClosedError);
  await assert.rejects(stream.completion(), RequestCancelledError);
  await cancelled;
});

test("a message that is too large", async () => {
  server.script = [
    fails({ code: status.RESOURCE_EXHAUSTED, message: "SERVER: Received message larger than max (9 vs. 8)" }),
  ];
  await assert.rejects(client.generate("x"), {
    name: "ResourceExhaustedError",
    message: `${server.target}: the request has 9 bytes, and the server takes at most 8`,
  });
  const channelOptions = { "grpc.max_receive_message_length": 100 };
  const small = new Client(server.target, { channelOptions, retry: NO_RETRY });
  server.script = [answers("x".repeat(200))];
  await assert.rejects(small.generate("x"), {
    name: "ResourceExhaustedError",
    message: /: the answer has \d+ bytes, and this client takes at most 100; raise it by channelOptions: \{ "grpc\.max/,
  });
  small.close();
});

test("TLS for a server that has none", async () => {
  const port = server.target.split(":").pop();
  const secure = new Client(`localhost:${port}`, { tls: true, retry: NO_RETRY });
  await assert.rejects(secure.modelInfo(), {
    name: "UnavailableError",
    message: new RegExp(
      `^cannot connect to localhost:${port}: what listens there does not use TLS; leave out TLS.*[^: ]\\)$`,
    ),
  });
  secure.close();
});

test("a server that is not there", async () => {
  server.stop();
  await assert.rejects(client.generate("x"), (error) => {
    assert.ok(error instanceof UnavailableError);
    assert.ok(error.message.startsWith(`cannot connect to ${server.target}: nothing listens there`), error.message);
    assert.match(error.message, /ECONNREFUSED/);
    return true;
  });
});
