/** Prompts and options of requests, as messages. Their types are checked here; the server checks ranges. */

import { type DescMessage, fromJson, type JsonValue, type MessageShape } from "@bufbuild/protobuf";
import { isFieldError } from "@bufbuild/protobuf/reflect";
import { ArgumentError } from "./errors.js";
import * as pb from "./gen/draftwood/v1/generation_pb.js";

/** The fields of a generated message, each of which may be left out but for those that are `Needed`. */
type Fields<Message, Needed extends keyof Message = never> = { readonly [Name in Needed]: Message[Name] } & {
  readonly [Name in Exclude<keyof Message, Needed | "$typeName" | "$unknown">]?: Message[Name] | undefined;
};

/** A function that the model may call; `parameters` is a JSON schema of its arguments, as JSON or as an object of it. */
export type Tool = Fields<Omit<pb.Tool, "parameters">, "name"> & { readonly parameters?: string | object | undefined };

/** A call that the model has written, such as one of `Completion.toolCalls`; its arguments are a JSON object, as JSON. */
export type ToolCall = Fields<pb.ToolCall, "name" | "arguments">;

/** A part of a message; parts are joined in their order. */
export type ContentPart = { readonly text: string };

/**
 * One message of a conversation. `role` is one of the model's chat template: "system", "user", "assistant", or "tool" for
 * the result of a call, whose id and tool `toolCallId` and `toolName` are. `reasoning` and `toolCalls` are those of an
 * answer of the model. A `content` that is a string is one part.
 */
export type ChatMessage = Fields<Omit<pb.ChatMessage, "content" | "toolCalls">, "role"> & {
  readonly content: string | readonly ContentPart[];
  readonly toolCalls?: readonly ToolCall[] | undefined;
};

/**
 * Options of `chat`, `complete` and their streams. An option that is missing or undefined has the server's default.
 * Those that have no comment are fields of the protocol: of GenerateRequest, SamplingOptions, StopOptions, DraftOptions
 * and OutputOptions.
 */
export interface GenerateOptions
  extends Fields<
      Pick<pb.GenerateRequest, "model" | "tenant" | "requestId" | "session" | "priority"> &
        Omit<pb.SamplingOptions, "seed">
    >,
    Fields<Omit<pb.StopOptions, "strings" | "tokenIds">>,
    Fields<Omit<pb.DraftOptions, "enabled" | "maxNodes">>,
    Fields<pb.OutputOptions> {
  /** Same seed, same answer. 64 bits: beyond Number.MAX_SAFE_INTEGER only as a bigint. */
  readonly seed?: bigint | number | undefined;
  /** What the model may call; the answer has its calls as `toolCalls`. */
  readonly tools?: readonly Tool[] | undefined;
  /** The format of the answer, one of three: a JSON schema, as JSON or as an object of it. */
  readonly jsonSchema?: string | object | undefined;
  /** A regular expression in Rust's syntax. */
  readonly regex?: string | undefined;
  /** A grammar in Lark's syntax. */
  readonly lark?: string | undefined;
  /** The answer ends before one of these. */
  readonly stop?: string | readonly string[] | undefined;
  readonly stopTokenIds?: readonly number[] | undefined;
  /** False switches drafting off. Drafting never changes the answer. */
  readonly drafting?: boolean | undefined;
  /** Draft nodes per step. */
  readonly maxDraftNodes?: number | undefined;
}

/** Options by the name of their field in the protocol, if that differs. */
const OPTIONS: Partial<Record<string, string>> = { strings: "stop", enabled: "drafting", maxNodes: "maxDraftNodes" };

/** The prompt of `complete`. */
export function plainPrompt(prompt: unknown): object {
  if (Array.isArray(prompt) && typeof prompt[0] === "object") {
    throw new ArgumentError("prompt", "must be text or token ids; `chat` answers messages");
  }
  return typeof prompt === "string" ? { text: prompt } : { tokenIds: { ids: prompt } };
}

/** The prompt of `chat`; a text is one message of the user. @throws ArgumentError a message lacks role or content. */
export function conversation(messages: unknown, tools?: GenerateOptions["tools"]): object {
  const all = typeof messages === "string" ? [{ role: "user", content: messages }] : messages;
  const isContent = (content: unknown) =>
    typeof content === "string" ||
    (Array.isArray(content) && content.every((part: Partial<ContentPart> | null) => typeof part?.text === "string"));
  const isComplete = (message?: Partial<ChatMessage>) =>
    typeof message?.role === "string" && isContent(message.content);
  const incomplete = Array.isArray(all) ? all.findIndex((message) => !isComplete(message)) : 0;
  if (incomplete !== -1) {
    const needed = "must have a role, which is a string, and a content, which is a string or an array of { text }";
    throw new ArgumentError(`messages[${incomplete}]`, needed);
  }
  const parts = (content: ChatMessage["content"]) => (typeof content === "string" ? [{ text: content }] : content);
  return {
    chat: {
      messages: (all as ChatMessage[]).map((message) => ({ ...message, content: parts(message.content) })),
      tools: tools?.map((tool) => ({ ...tool, parameters: json(tool.parameters) })),
    },
  };
}

/** @throws ArgumentError an option cannot be encoded, or there is none of its name. */
export function requestOf(prompt: object, options: Omit<GenerateOptions, "tools">): pb.GenerateRequest {
  const { model, tenant, requestId, session, priority, ...parts } = options;
  const { maxTokens, minTokens, ignoreEos, stop, stopTokenIds, ...withoutStop } = parts;
  const { strategy, learn, drafting, maxDraftNodes, ...withoutDrafting } = withoutStop;
  const { tokenDetails, includeSpecialTokens, topLogprobs, draftTrees, rawText, ...withoutOutput } = withoutDrafting;
  const { jsonSchema, regex, lark, ...sampling } = withoutOutput;
  const strings = typeof stop === "string" ? [stop] : stop;
  if (typeof sampling.seed === "number" && !Number.isSafeInteger(sampling.seed)) {
    throw new ArgumentError("seed", `${sampling.seed} is not exact as a number; use a bigint`);
  }
  return encode(pb.GenerateRequestSchema, {
    ...prompt,
    ...{ model, tenant, requestId, session, priority, sampling },
    stop: { maxTokens, minTokens, ignoreEos, strings, tokenIds: stopTokenIds },
    drafting: { strategy, learn, enabled: drafting, maxNodes: maxDraftNodes },
    output: { tokenDetails, includeSpecialTokens, topLogprobs, draftTrees, rawText },
    format: { jsonSchema: json(jsonSchema), regex, lark },
  });
}

function json(schema: string | object | undefined): string | undefined {
  return typeof schema === "object" ? JSON.stringify(schema) : schema;
}

/** A message of plain values. @throws ArgumentError a value has another type than its field, or a name is unknown. */
export function encode<Schema extends DescMessage>(schema: Schema, value: object): MessageShape<Schema> {
  try {
    // JSON has no bigints, and neither NaN nor infinity. Generated messages, such as calls of an answer, have `$typeName`.
    const written = JSON.stringify(value, (key, part) => {
      if (key === "$typeName" || key === "$unknown") return undefined;
      return typeof part === "bigint" || (typeof part === "number" && !Number.isFinite(part)) ? String(part) : part;
    });
    return fromJson(schema, JSON.parse(written) as JsonValue);
  } catch (error) {
    const { cause, message } = error as Error;
    const name = isFieldError(cause) ? cause.field().localName : "options";
    throw new ArgumentError(
      OPTIONS[name] ?? name,
      isFieldError(cause) ? cause.message : message.replace(/.* from JSON: /, ""),
    );
  }
}
