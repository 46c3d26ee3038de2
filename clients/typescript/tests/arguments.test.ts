/** What is refused before anything is sent, and how it is said. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { ArgumentError, Client, type ClientOptions } from "draftwood-client";

const client = new Client();

const OPTIONS: [options: Record<string, unknown>, message: string | RegExp][] = [
  [{ max_tokens: 3 }, '"max_tokens": there is no such option; did you mean "maxTokens"?'],
  [{ beams: 3 }, '"beams": there is no such option'],
  [{ maxTokens: "3" }, "maxTokens: must be an integer, not string"],
  [{ maxTokens: 1.5 }, "maxTokens: 1.5 is not allowed; it must be an integer in [-2147483648, 2147483647]"],
  [{ temperature: Number.NaN }, "temperature: NaN is not allowed; it must be finite in 32 bits"],
  [{ temperature: 1e39 }, "temperature: 1e+39 is not allowed; it must be finite in 32 bits"],
  [{ seed: -1n }, "seed: -1 is not allowed; it must lie in [0, 18446744073709551615]"],
  [{ seed: 2n ** 64n }, /^seed: 18446744073709551616 is not allowed/],
  [{ seed: 2 ** 60 }, "seed: 1152921504606847000 is not exact as a number; use a bigint"],
  [{ stop: ["a", 3] }, "stop[1]: must be a string, not number"],
  [{ stop: "\ud800" }, "stop: has an unpaired surrogate, which is not text"],
  [{ logitBias: { x: 1 } }, /^logitBias\["x"\]: NaN is not allowed/],
  [{ logitBias: { 7: "1" } }, "logitBias[7]: must be a number, not string"],
  [{ stopTokenIds: [1, -1] }, /^stopTokenIds\[1\]: -1 is not allowed/],
  [{ regex: "a", lark: "b" }, "lark: cannot be combined with regex: an answer has one format"],
  [{ jsonSchema: null }, "jsonSchema: must be a string, not null"],
  [{ ignoreEos: 1 }, "ignoreEos: must be a boolean, not number"],
  [{ tools: [{ name: "f" }] }, "tools: needs a prompt of chat messages"],
  [{ tools: [{ description: "f" }] }, "tools[0].name: must be a string, not undefined"],
  [{ timeoutMs: 0 }, "timeoutMs: 0 is not allowed; it must be above 0 milliseconds"],
  [{ timeoutMs: "1s" }, "timeoutMs: must be a number of milliseconds, not string"],
];

for (const [options, message] of OPTIONS) {
  test(`option ${Object.keys(options).join(", ")}: ${String(message)}`, () => {
    assert.throws(() => client.stream("x", options), { name: "ArgumentError", message });
  });
}

const PROMPTS: [prompt: unknown, message: string | RegExp][] = [
  [[], "prompt: must hold at least one token id or chat message"],
  [undefined, "prompt: must be text, token ids or chat messages, not undefined"],
  [[1, "2"], "prompt[1]: must be an integer, not string"],
  [[{ role: "user", content: "a" }, 3], "prompt[1]: must be a chat message, not number"],
  [[{ role: "user" }], "prompt[0].content: must be a string, not undefined"],
  [[{ role: "user", content: "a", name: "b" }], /^prompt\[0\]: has the keys "role", .* and no others, such as "name"/],
  [[{ role: "user", content: "a", toolCalls: [3] }], "prompt[0].toolCalls[0]: must be a call, not number"],
  [{ role: "user", content: "a" }, "prompt: must be text, token ids or chat messages, not object"],
];

for (const [prompt, message] of PROMPTS) {
  test(`prompt ${JSON.stringify(prompt)}`, () => {
    assert.throws(() => client.stream(prompt as string), { name: "ArgumentError", message });
  });
}

test("chat takes messages, complete takes text", () => {
  const refused = { name: "ArgumentError" };
  assert.throws(() => client.streamChat([1] as never), {
    ...refused,
    message: /^messages\[0\]: must be a chat message/,
  });
  assert.throws(() => client.streamChat([]), { ...refused, message: /^messages: must hold at least one/ });
  assert.throws(() => client.streamChat([{ role: "user" }] as never), {
    ...refused,
    message: /^messages\[0\]\.content/,
  });
  const messages = [{ role: "user", content: "x" }];
  assert.throws(() => client.streamComplete(messages as never), { ...refused, message: /`chat` answers messages$/ });
});

test("an address is no URL", () => {
  assert.throws(() => new Client("http://127.0.0.1:50051"), { name: "ArgumentError", message: /^target: .* is a URL/ });
});

const CLIENTS: [options: ClientOptions, argument: string][] = [
  [{ retry: { maxAttempts: 6 } }, "retry.maxAttempts"],
  [{ retry: { initialBackoffMs: 1 } }, "retry.initialBackoffMs"],
  [{ retry: { multiplier: Number.NaN } }, "retry.multiplier"],
  [{ timeoutMs: -1 }, "timeoutMs"],
  [{ tls: { privateKey: Buffer.from("k") } }, "tls"],
  [{ apiKey: "two words" }, "apiKey"],
];

for (const [options, argument] of CLIENTS) {
  test(`client ${JSON.stringify(options)}`, () => {
    assert.throws(
      () => new Client("localhost:1", options),
      (error) => {
        assert.ok(error instanceof ArgumentError);
        assert.equal(error.argument, argument);
        assert.ok(!error.message.includes("two words"));
        return true;
      },
    );
  });
}

test("an option that is undefined is left to the server", () => {
  client.stream("x", { maxTokens: undefined, seed: undefined, timeoutMs: undefined });
});
