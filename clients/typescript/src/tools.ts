/** Separates calls of tools from the text of an answer. */

import { randomUUID } from "node:crypto";
import type { ToolCall } from "./request.js";
import type { ToolFormat } from "./results.js";

/** The beginning of a JSON object or, where the group is empty, of what may yet be one. */
const OBJECT = /\{\s*(?:(["}])|$)|$/y;
const MARKS = /\\.|["{}]/gs;
/** A string, a bracket, or what parts the members of an object. */
const TOKENS = /"(?:\\.|[^"\\])*"|[[\]{},:]/gs;

/**
 * Separates the calls of an answer from its text, as the answer comes.
 *
 * Where a call begins with a marker such as "<tool_call>", calls may be anywhere; where it begins with a bracket, only at
 * the start of the answer or behind another call, as any text can have brackets. White space around calls is part of them.
 * What turns out to be no call is text; nothing is lost.
 */
export class ToolCallReader {
  readonly #form: ToolFormat;
  readonly #names: ReadonlySet<string>;
  readonly #begin: string;
  readonly #end: string;
  readonly #between: string;
  readonly #anywhere: boolean;
  readonly #nextToEachOther: boolean;
  #held = "";
  #object: OpenObject | undefined;
  #atStart = true;
  #called = false;

  /**
   * @param form How the model writes calls: `ModelInfo.toolFormat`.
   * @param names Of the tools; a call of another one is text.
   */
  constructor(form: ToolFormat, names: Iterable<string>) {
    this.#form = form;
    this.#names = new Set(names);
    this.#begin = form.begin.trim();
    this.#end = form.end.trim();
    const between = (form.between ?? "").trim();
    this.#between = this.#end !== "" && between.startsWith(this.#end) ? "" : between;
    this.#anywhere = /[\p{L}\p{N}]/u.test(form.begin);
    this.#nextToEachOther = form.between !== undefined && this.#between === "" && this.#end === "";
  }

  /** What is certain after some more text: pieces of text and calls, in their order. */
  push(text: string): (string | ToolCall)[] {
    this.#held += text;
    if (this.#object !== undefined && this.#object.end(this.#held) === undefined) return [];
    return this.#read(false);
  }

  /** What is left at the end of the answer. */
  close(): (string | ToolCall)[] {
    return this.#read(true);
  }

  #read(last: boolean): (string | ToolCall)[] {
    const found: (string | ToolCall)[] = [];
    while (this.#held !== "") {
      found.push(...this.#take(this.#nextCall(last)));
      if (this.#held === "" || (!last && this.#mayGrow())) break;
      const read = this.#calls(last);
      if (read === undefined) break;
      if (read.calls.length === 0) {
        found.push(...this.#take(read.size));
        continue;
      }
      found.push(...read.calls);
      this.#held = this.#held.slice(read.size);
      this.#atStart = this.#nextToEachOther;
      this.#called = true;
    }
    return found;
  }

  /** Text of so many characters; none if it is only the white space behind the last call. */
  #take(size: number): string[] {
    const text = this.#held.slice(0, size);
    this.#held = this.#held.slice(size);
    if (text === "" || (this.#called && this.#held === "" && text.trim() === "")) return [];
    this.#atStart = this.#called = false;
    return [text];
  }

  /** Where the text ends behind which a call may begin, with white space before it. */
  #nextCall(last: boolean): number {
    const held = this.#held;
    let at = last ? held.length : held.length - overlap(held, this.#begin);
    if (this.#anywhere && held.includes(this.#begin)) at = held.indexOf(this.#begin);
    else if (!this.#anywhere && this.#atStart) at = 0;
    else if (last) return at;
    return held.slice(0, at).trimEnd().length;
  }

  /** Whether what is held may yet become the beginning of a call, or the white space before more text. */
  #mayGrow(): boolean {
    const written = this.#held.replaceAll(/\s/g, "");
    const begin = `${this.#begin.replaceAll(/\s/g, "")}{`;
    return written.length < begin.length && begin.startsWith(written);
  }

  /**
   * The calls that the held text begins with, and their size in characters. Without calls, the size of what is text
   * instead; undefined as long as that cannot be told.
   */
  #calls(last: boolean): { size: number; calls: ToolCall[] } | undefined {
    const held = this.#held;
    const blank = behindBlanks(held, 0);
    const noCall = { size: this.#anywhere ? blank + this.#begin.length : held.length, calls: [] };
    if (!held.startsWith(this.#begin, blank)) return noCall;
    const calls: ToolCall[] = [];
    for (let at = blank + this.#begin.length; ; ) {
      at = behindBlanks(held, at);
      if (!last && this.#isOpen(at)) return undefined;
      this.#object = undefined;
      const read = this.#call(at);
      if (read === undefined) return noCall;
      calls.push(read.call);
      if (this.#end === "" && this.#between === "") return { size: read.end, calls };
      at = behindBlanks(held, read.end);
      const rest = held.slice(at);
      if (this.#between !== "" && rest.startsWith(this.#between)) at += this.#between.length;
      else if (this.#end !== "" && rest.startsWith(this.#end)) return { size: at + this.#end.length, calls };
      else if (last || (this.#end === "" && rest !== "" && !this.#between.startsWith(rest)))
        return rest !== "" && this.#end !== "" ? noCall : { size: read.end, calls };
      else if (this.#end.startsWith(rest) || this.#between.startsWith(rest)) return undefined;
      else return noCall;
    }
  }

  /** Whether an object begins at a place, or may yet, that goes on behind the held text. */
  #isOpen(at: number): boolean {
    OBJECT.lastIndex = at;
    const begun = OBJECT.exec(this.#held);
    if (begun === null) return false;
    this.#object = begun[1] === undefined ? undefined : new OpenObject(at);
    return this.#object === undefined || this.#object.end(this.#held) === undefined;
  }

  /** The call at a place and where it ends; undefined if there is none, or not in JSON that every reader takes. */
  #call(at: number): { call: ToolCall; end: number } | undefined {
    const end = this.#held[at] === "{" ? new OpenObject(at).end(this.#held) : undefined;
    if (end === undefined) return undefined;
    const text = this.#held.slice(at, end);
    const parsed = parse(text);
    const name = parsed?.[this.#form.nameKey];
    const given = parsed?.[this.#form.argumentsKey];
    if (typeof name !== "string" || !this.#names.has(name) || !isObject(given)) return undefined;
    const call = { id: `call_${randomUUID().replaceAll("-", "").slice(0, 24)}`, name };
    return { call: { ...call, arguments: member(text, this.#form.argumentsKey) }, end };
  }
}

/** Finds where a JSON object ends in a text that grows; each character is looked at once. */
class OpenObject {
  #at: number;
  #depth = 0;
  #inString = false;

  constructor(at: number) {
    this.#at = at;
  }

  /** Behind its last bracket; undefined where it goes on behind the text. */
  end(text: string): number | undefined {
    MARKS.lastIndex = this.#at;
    for (let mark = MARKS.exec(text); mark !== null; mark = MARKS.exec(text)) {
      this.#at = MARKS.lastIndex;
      if (mark[0] === '"') this.#inString = !this.#inString;
      else if (!this.#inString && (mark[0] === "{" || mark[0] === "}")) {
        this.#depth += mark[0] === "{" ? 1 : -1;
        if (this.#depth === 0) return this.#at;
      }
    }
    this.#at = Math.max(this.#at, text.length - (text.endsWith("\\") ? 1 : 0)); // what is escaped may be yet to come
    return undefined;
  }
}

/** The object that a JSON text is; undefined if it is none, or has numbers or strings that not every reader takes. */
function parse(text: string): Record<string, unknown> | undefined {
  try {
    const parsed = JSON.parse(text, (_, value) => {
      const strange = typeof value === "number" ? !Number.isFinite(value) : !isWellFormed(value);
      if (strange) throw new RangeError();
      return value;
    });
    return isObject(parsed) ? parsed : undefined;
  } catch {
    return undefined;
  }
}

/** Whether the strings of a value, and the keys of an object, have no half of a surrogate pair. */
function isWellFormed(value: unknown): boolean {
  if (typeof value === "string") return value.isWellFormed();
  return !isObject(value) || Object.keys(value).every((key) => key.isWellFormed());
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The text of an object's member, the last one of that name: as it was written, since parsing rounds long numbers. */
function member(text: string, name: string): string {
  let depth = 0;
  let key = "";
  let from = 0;
  let found = "";
  TOKENS.lastIndex = 0;
  for (let token = TOKENS.exec(text); token !== null; token = TOKENS.exec(text)) {
    const [mark] = token;
    if (mark === "{" || mark === "[") depth += 1;
    else if (mark === "}" || mark === "]") depth -= 1;
    if ((depth === 1 && mark === ",") || depth === 0) {
      if (key === name) found = text.slice(from, token.index).trim();
      from = 0;
    } else if (depth === 1 && from === 0) {
      if (mark === ":") from = TOKENS.lastIndex;
      else if (mark.startsWith('"')) key = JSON.parse(mark);
    }
  }
  return found;
}

function behindBlanks(text: string, at: number): number {
  return text.length - text.slice(at).trimStart().length;
}

/** Characters at the end of a text that a marker begins with. */
function overlap(text: string, marker: string): number {
  for (let size = Math.min(text.length, marker.length); size > 0; size -= 1) {
    if (text.endsWith(marker.slice(0, size))) return size;
  }
  return 0;
}
