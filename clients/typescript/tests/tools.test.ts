/** Calls of tools in answers, however they are cut into deltas: the cases of the Python client. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { type ToolCall, ToolCallReader, type ToolFormat } from "draftwood-client";

type Piece = string | { name: string; arguments: unknown };
const PATH = join(import.meta.dirname, "..", "..", "..", "..", "tests", "client", "tool_calls.json");
const { forms, names, cases } = JSON.parse(readFileSync(PATH, "utf8")) as {
  forms: Record<string, Omit<ToolFormat, "between"> & { between: string | null }>;
  names: string[];
  cases: { form: string; text: string; expected: Piece[] | null }[];
};

function form(name: string): ToolFormat {
  const { between, ...others } = forms[name] ?? assert.fail(name);
  return { ...others, between: between ?? undefined };
}

/** The pieces of a text that comes in parts, neighbouring texts as one. */
function read(name: string, parts: readonly string[]): Piece[] {
  const reader = new ToolCallReader(form(name), names);
  const merged: Piece[] = [];
  for (const one of [...parts.flatMap((part) => reader.push(part)), ...reader.close()]) {
    const last = merged.at(-1);
    if (typeof one !== "string") merged.push(shown(one));
    else if (typeof last === "string") merged[merged.length - 1] = last + one;
    else merged.push(one);
  }
  return merged;
}

function shown({ id, name, arguments: given }: ToolCall): Piece {
  assert.match(id ?? "", /^call_[0-9a-f]{24}$/);
  return { name, arguments: JSON.parse(given) };
}

test("calls and text", () => {
  assert.ok(cases.length > 20);
  for (const { form, text, expected } of cases) assert.deepEqual(read(form, [text]), expected ?? [text], text);
});

test("how a text is cut changes nothing", () => {
  for (const { form, text, expected } of cases) {
    const right = expected ?? [text];
    assert.deepEqual(read(form, [...text]), right, text);
    for (let at = 1; at < text.length; at += 1) {
      assert.deepEqual(read(form, [text.slice(0, at), text.slice(at)]), right, `${text}, cut at ${at}`);
    }
  }
});

test("text is not held back for long", () => {
  const reader = new ToolCallReader(form("marked"), names);
  assert.deepEqual(reader.push("An answer without calls"), ["An answer without calls"]);
  assert.deepEqual(reader.push(" and <b"), [" and <b"]);
  assert.deepEqual(reader.push(" <tool"), []);
  assert.deepEqual(reader.push("box>"), [" <toolbox>"]);
});

test("arguments are the text that the model wrote", () => {
  const given = '{"order": 12345678901234567890, "of": {"arguments": [1.0, "}, {"]}}';
  const text = `<tool_call>{"arguments": {}, "name" : "track", "arguments" : ${given} }</tool_call>`;
  const [call] = new ToolCallReader(form("marked"), names).push(text);
  assert.equal((call as ToolCall).arguments, given);
});

test("each character of a long call is looked at once", () => {
  const text = `<tool_call>{"name": "track", "arguments": {"list": [${"{}, ".repeat(25_000)}{}]}}</tool_call>`;
  const parts = text.match(/.{1,4}/gs) ?? [];
  const began = performance.now();
  assert.equal(read("marked", parts).length, 1);
  assert.ok(performance.now() - began < 10_000);
});
