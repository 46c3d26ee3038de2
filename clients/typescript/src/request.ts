/**
 * Prompts and options of requests, and their encoding as protobuf messages.
 *
 * Checks here are those that encoding needs; the server checks ranges.
 */

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { ArgumentError } from "./errors.js";
import {
  type Chat,
  ChatMessageSchema,
  ChatSchema,
  type GenerateRequest,
  GenerateRequestSchema,
  type TokenizeRequest,
  TokenizeRequestSchema,
  type ToolCallSchema,
  ToolSchema,
} from "./gen/draftwood/v1/generation_pb.js";

/** A function that the model may call. */
export interface Tool {
  readonly name: string;
  readonly description?: string | undefined;
  /** A JSON schema of its arguments, an object: as JSON or as an object of it. */
  readonly parameters?: string | object | undefined;
}

/** A call that the model has written. */
export interface ToolCall {
  readonly id?: string | undefined;
  readonly name: string;
  /** A JSON object, as JSON. */
  readonly arguments: string;
}

/** One message of a conversation. */
export interface ChatMessage {
  /** One of the model's chat template: "system", "user", "assistant", or "tool" for the result of a call. */
  readonly role: string;
  readonly content: string;
  /** Of an answer of the model. */
  readonly toolCalls?: readonly ToolCall[] | undefined;
  /** Of a result: the call that it belongs to, and the name of its tool. */
  readonly toolCallId?: string | undefined;
  readonly toolName?: string | undefined;
}

/** Text or token ids, which are continued as they are, or a conversation, which is answered. */
export type Prompt = string | readonly number[] | readonly ChatMessage[];

/** Options of `chat`, `complete` and their streams. An option that is missing or undefined has the server's default. */
export interface GenerateOptions {
  /** The served model, if it is named at all. */
  readonly model?: string | undefined;
  /** Owner of the memory that drafts and learns: that of the credential, or "default". */
  readonly tenant?: string | undefined;
  /** For logs and traces; drawn if there is none. All attempts of a request have the same. */
  readonly requestId?: string | undefined;
  /** A key of the conversation, by which experiments give its requests the same arm. */
  readonly session?: string | undefined;
  /** Among the tenant's requests, -10 to 10, higher first. */
  readonly priority?: number | undefined;
  /** 0, the default, is greedy. */
  readonly temperature?: number | undefined;
  readonly topK?: number | undefined;
  readonly topP?: number | undefined;
  readonly minP?: number | undefined;
  readonly repetitionPenalty?: number | undefined;
  readonly presencePenalty?: number | undefined;
  readonly frequencyPenalty?: number | undefined;
  /** Same seed, same answer. 64 bits: beyond Number.MAX_SAFE_INTEGER only as a bigint. */
  readonly seed?: bigint | number | undefined;
  /** Token id to a number that is added to its logit. */
  readonly logitBias?: Readonly<Record<number, number>> | undefined;
  /** Number of samples; sample i is the answer to seed + i. */
  readonly n?: number | undefined;
  /** What the model may call; it writes calls as text, in the form of `ModelInfo.toolFormat`. */
  readonly tools?: readonly Tool[] | undefined;
  /** The format of the answer, one of three: a JSON schema, as JSON or as an object of it. */
  readonly jsonSchema?: string | object | undefined;
  /** A regular expression in Rust's syntax. */
  readonly regex?: string | undefined;
  /** A grammar in Lark's syntax. */
  readonly lark?: string | undefined;
  readonly maxTokens?: number | undefined;
  readonly minTokens?: number | undefined;
  /** The answer ends before one of these. */
  readonly stop?: string | readonly string[] | undefined;
  readonly stopTokenIds?: readonly number[] | undefined;
  /** Go on after the model's end-of-sequence tokens. */
  readonly ignoreEos?: boolean | undefined;
  /** False switches drafting off. Drafting never changes the answer. */
  readonly drafting?: boolean | undefined;
  /** False drafts, and learns nothing of this request. */
  readonly learn?: boolean | undefined;
  /** One of `ModelInfo.strategies`. */
  readonly strategy?: string | undefined;
  /** Draft nodes per step. */
  readonly maxDraftNodes?: number | undefined;
  /** The text of each token, and whether it was drafted. */
  readonly tokenDetails?: boolean | undefined;
  readonly includeSpecialTokens?: boolean | undefined;
  /** Log-probabilities of the tokens and of as many alternatives. */
  readonly topLogprobs?: number | undefined;
  /** The drafts that each step verified; needs the role tenant-admin. */
  readonly draftTrees?: boolean | undefined;
}

/** Text or token ids. @throws ArgumentError for anything else; `chat` answers messages. */
export function plainPrompt(prompt: unknown): string | number[] {
  if (typeof prompt === "string") {
    return prompt;
  }
  const all = items("prompt", prompt, "text or token ids");
  if (typeof all[0] === "object") {
    throw new ArgumentError("prompt", "must be text or token ids; `chat` answers messages");
  }
  return all as number[];
}

/** Messages; a text is one of the user. @throws ArgumentError for token ids, which are no messages. */
export function conversation(messages: unknown): ChatMessage[] {
  if (typeof messages === "string") {
    return [{ role: "user", content: messages }];
  }
  const all = items("messages", messages, "chat messages, or the text of one");
  if (all.length > 0 && typeof all[0] !== "object") {
    throw new ArgumentError("messages[0]", `must be a chat message, not ${kind(all[0])}`);
  }
  return all as ChatMessage[];
}

/**
 * @param name of the prompt, in errors.
 * @throws ArgumentError prompt or options cannot be encoded.
 */
export function generateRequest(prompt: Prompt, options: GenerateOptions, name = "prompt"): GenerateRequest {
  const request: MessageInitShape<typeof GenerateRequestSchema> = { prompt: encodedPrompt(name, prompt) };
  const parts: Record<string, Record<string, unknown>> = { request: {} };
  for (const [name, value] of Object.entries(options)) {
    const [part, field, check] = lookup(name);
    if (value !== undefined) {
      parts[part] ??= {};
      parts[part][field] = check(name, value);
    }
  }
  const { request: own, format, chat: offered, ...messages } = parts;
  if (offered) {
    if (request.prompt?.case !== "chat") {
      throw new ArgumentError("tools", "needs a prompt of chat messages");
    }
    Object.assign(request.prompt.value, offered);
  }
  const [oneFormat, ...others] = Object.entries(format ?? {});
  if (oneFormat && others[0]) {
    throw new ArgumentError(others[0][0], `cannot be combined with ${oneFormat[0]}: an answer has one format`);
  }
  const init = oneFormat ? { format: { format: { case: oneFormat[0], value: oneFormat[1] } } } : {};
  return create(GenerateRequestSchema, { ...request, ...own, ...messages, ...init } as typeof request);
}

/** @throws ArgumentError the input cannot be encoded. */
export function tokenizeRequest(input: string | readonly ChatMessage[]): TokenizeRequest {
  return create(TokenizeRequestSchema, {
    input:
      typeof input === "string"
        ? { case: "text", value: text("input", input) }
        : { case: "chat", value: chat("input", input) },
  });
}

export function tokenIds(name: string, value: unknown): number[] {
  return items(name, value, "an array of token ids").map((one, index) => tokenId(`${name}[${index}]`, one));
}

/** A time limit in milliseconds; undefined for no limit, which Infinity means too. */
export function timeLimit(name: string, value: unknown): number | undefined {
  if (value === undefined || value === Number.POSITIVE_INFINITY) {
    return undefined;
  }
  if (typeof value !== "number") {
    throw new ArgumentError(name, `must be a number of milliseconds, not ${kind(value)}`);
  }
  if (!(value > 0)) {
    throw new ArgumentError(name, `${value} is not allowed; it must be above 0 milliseconds`);
  }
  return value;
}

export function kind(value: unknown): string {
  return value === null ? "null" : Array.isArray(value) ? "an array" : typeof value;
}

type EncodedPrompt = NonNullable<MessageInitShape<typeof GenerateRequestSchema>["prompt"]>;

function encodedPrompt(name: string, prompt: unknown): EncodedPrompt {
  if (typeof prompt === "string") {
    return { case: "text", value: text(name, prompt) };
  }
  const all = items(name, prompt, "text, token ids or chat messages");
  if (all.length === 0) {
    throw new ArgumentError(name, "must hold at least one token id or chat message");
  }
  return typeof all[0] === "object"
    ? { case: "chat", value: chat(name, all) }
    : { case: "tokenIds", value: { ids: tokenIds(name, all) } };
}

function chat(name: string, value: unknown): Chat {
  const messages = items(name, value, "text or chat messages").map((one, index) => message(`${name}[${index}]`, one));
  if (messages.length === 0) {
    throw new ArgumentError(name, "must hold at least one chat message");
  }
  return create(ChatSchema, { messages });
}

function message(name: string, value: unknown) {
  if (typeof value !== "object" || value === null) {
    throw new ArgumentError(name, `must be a chat message, not ${kind(value)}`);
  }
  const { role, content, toolCalls, toolCallId, toolName, ...others } = value as Record<string, unknown>;
  const [other] = Object.keys(others);
  if (other !== undefined) {
    const known = '"role", "content", "toolCalls", "toolCallId" and "toolName"';
    throw new ArgumentError(name, `has the keys ${known} and no others, such as ${quoted(other)}`);
  }
  const init: MessageInitShape<typeof ChatMessageSchema> = {
    role: text(`${name}.role`, role),
    content: text(`${name}.content`, content),
    toolCalls: items(`${name}.toolCalls`, toolCalls ?? [], "an array of calls").map((one, index) =>
      toolCall(`${name}.toolCalls[${index}]`, one),
    ),
    toolCallId: text(`${name}.toolCallId`, toolCallId ?? ""),
    toolName: text(`${name}.toolName`, toolName ?? ""),
  };
  return create(ChatMessageSchema, init);
}

function toolCall(name: string, value: unknown): MessageInitShape<typeof ToolCallSchema> {
  const { id, name: called, arguments: given } = object(name, value, "a call");
  return {
    id: text(`${name}.id`, id ?? ""),
    name: text(`${name}.name`, called),
    arguments: text(`${name}.arguments`, given),
  };
}

const tools: Check = (name, value) =>
  items(name, value, "an array of tools").map((one, index) => {
    const field = `${name}[${index}]`;
    const { name: called, description, parameters } = object(field, one, "a tool");
    return create(ToolSchema, {
      name: text(`${field}.name`, called),
      description: text(`${field}.description`, description ?? ""),
      parameters: schema(`${field}.parameters`, parameters ?? "") as string,
    });
  });

function object(name: string, value: unknown, expected: string): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new ArgumentError(name, `must be ${expected}, not ${kind(value)}`);
  }
  return value as Record<string, unknown>;
}

type Check = (name: string, value: unknown) => unknown;

function text(name: string, value: unknown): string {
  if (typeof value !== "string") {
    throw new ArgumentError(name, `must be a string, not ${kind(value)}`);
  }
  if (!value.isWellFormed()) {
    throw new ArgumentError(name, "has an unpaired surrogate, which is not text");
  }
  return value;
}

function strings(name: string, value: unknown): string[] {
  return typeof value === "string"
    ? [text(name, value)]
    : items(name, value, "a string or an array of them").map((one, index) => text(`${name}[${index}]`, one));
}

function items(name: string, value: unknown, expected: string): unknown[] {
  if (!Array.isArray(value)) {
    throw new ArgumentError(name, `must be ${expected}, not ${kind(value)}`);
  }
  return value;
}

function integer(name: string, value: unknown, low: number, high: number): number {
  if (typeof value !== "number") {
    throw new ArgumentError(name, `must be an integer, not ${kind(value)}`);
  }
  if (!Number.isInteger(value) || value < low || value > high) {
    throw new ArgumentError(name, `${value} is not allowed; it must be an integer in [${low}, ${high}]`);
  }
  return value;
}

const int32: Check = (name, value) => integer(name, value, -(2 ** 31), 2 ** 31 - 1);

const tokenId = (name: string, value: unknown) => integer(name, value, 0, 2 ** 31 - 1);

const uint64: Check = (name, value) => {
  if (typeof value === "number" && value > Number.MAX_SAFE_INTEGER) {
    throw new ArgumentError(name, `${value} is not exact as a number; use a bigint`);
  }
  const number = typeof value === "bigint" ? value : BigInt(integer(name, value, 0, Number.MAX_SAFE_INTEGER));
  if (number < 0n || number >= 2n ** 64n) {
    throw new ArgumentError(name, `${number} is not allowed; it must lie in [0, ${2n ** 64n - 1n}]`);
  }
  return number;
};

const number = (name: string, value: unknown) => {
  if (typeof value !== "number") {
    throw new ArgumentError(name, `must be a number, not ${kind(value)}`);
  }
  // The protocol has 32-bit floats.
  if (!Number.isFinite(Math.fround(value))) {
    throw new ArgumentError(name, `${value} is not allowed; it must be finite in 32 bits`);
  }
  return value;
};

const bias: Check = (name, value) => {
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new ArgumentError(name, `must be an object of token ids and numbers, not ${kind(value)}`);
  }
  const pairs = Object.entries(value).map(([token, one]) => {
    const id = /^\d+$/.test(token) ? Number(token) : Number.NaN;
    return [tokenId(`${name}[${quoted(token)}]`, id), number(`${name}[${token}]`, one)] as const;
  });
  return Object.fromEntries(pairs);
};

const schema: Check = (name, value) => {
  if (typeof value !== "object" || value === null) {
    return text(name, value);
  }
  try {
    return JSON.stringify(value);
  } catch (error) {
    throw new ArgumentError(name, `is not JSON: ${error instanceof Error ? error.message : error}`);
  }
};

const flag: Check = (name, value) => {
  if (typeof value !== "boolean") {
    throw new ArgumentError(name, `must be a boolean, not ${kind(value)}`);
  }
  return value;
};

function quoted(value: string): string {
  return JSON.stringify(value.length > 60 ? `${value.slice(0, 57)}...` : value);
}

function lookup(name: string): [part: string, field: string, check: Check] {
  const found = FIELDS.get(name as keyof GenerateOptions);
  if (found) {
    return found;
  }
  const plain = (one: string) => one.replaceAll(/[^a-z0-9]/gi, "").toLowerCase();
  const near = [...FIELDS.keys()].find((one) => plain(one) === plain(name));
  throw new ArgumentError(quoted(name), `there is no such option${near ? `; did you mean ${quoted(near)}?` : ""}`);
}

/** Option: part of the request ("request" for itself), field in it, check. */
const FIELDS = new Map<keyof GenerateOptions, [part: string, field: string, check: Check]>([
  ["model", ["request", "model", text]],
  ["tenant", ["request", "tenant", text]],
  ["requestId", ["request", "requestId", text]],
  ["session", ["request", "session", text]],
  ["priority", ["request", "priority", int32]],
  ["temperature", ["sampling", "temperature", number]],
  ["topK", ["sampling", "topK", int32]],
  ["topP", ["sampling", "topP", number]],
  ["minP", ["sampling", "minP", number]],
  ["repetitionPenalty", ["sampling", "repetitionPenalty", number]],
  ["presencePenalty", ["sampling", "presencePenalty", number]],
  ["frequencyPenalty", ["sampling", "frequencyPenalty", number]],
  ["seed", ["sampling", "seed", uint64]],
  ["logitBias", ["sampling", "logitBias", bias]],
  ["n", ["sampling", "n", int32]],
  ["tools", ["chat", "tools", tools]],
  ["jsonSchema", ["format", "jsonSchema", schema]],
  ["regex", ["format", "regex", text]],
  ["lark", ["format", "lark", text]],
  ["maxTokens", ["stop", "maxTokens", int32]],
  ["minTokens", ["stop", "minTokens", int32]],
  ["stop", ["stop", "strings", strings]],
  ["stopTokenIds", ["stop", "tokenIds", tokenIds]],
  ["ignoreEos", ["stop", "ignoreEos", flag]],
  ["drafting", ["drafting", "enabled", flag]],
  ["learn", ["drafting", "learn", flag]],
  ["strategy", ["drafting", "strategy", text]],
  ["maxDraftNodes", ["drafting", "maxNodes", int32]],
  ["tokenDetails", ["output", "tokenDetails", flag]],
  ["includeSpecialTokens", ["output", "includeSpecialTokens", flag]],
  ["topLogprobs", ["output", "topLogprobs", int32]],
  ["draftTrees", ["output", "draftTrees", flag]],
]);
