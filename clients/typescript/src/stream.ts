/** One answer as it is generated, and the whole answer. */

import { create } from "@bufbuild/protobuf";
import { cancelledError } from "./connection.js";
import { InternalError } from "./errors.js";
import * as pb from "./gen/draftwood/v1/generation_pb.js";

/**
 * Why a sample ended: at a stop string or token; at `maxTokens` or the end of the context; with calls of tools; because
 * the engine or an operator ended it. "unknown" is a reason of a newer server.
 */
export type FinishReason = "stop" | "length" | "tool_calls" | "cancelled" | "unknown";

const REASONS: Partial<Record<pb.FinishReason, FinishReason>> = {
  [pb.FinishReason.STOP]: "stop",
  [pb.FinishReason.LENGTH]: "length",
  [pb.FinishReason.TOOL_CALLS]: "tool_calls",
  [pb.FinishReason.CANCELLED]: "cancelled",
};

/** How a sample ended. */
export interface SampleResult {
  readonly finishReason: FinishReason;
  /** The stop string or stop token id that ended it. */
  readonly matchedStop: string | number | undefined;
  /** A request with this seed for its only sample gets the same answer. Undefined in greedy decoding. */
  readonly seed: bigint | undefined;
  /** Tokens of this sample. */
  readonly usage: pb.SampleUsage;
}

/** Text, reasoning, or a call of a tool: a whole one in a `Sample`, a piece of one in a `Delta`. */
export type Part<Call = pb.ToolCall> =
  | { readonly case: "text" | "reasoning"; readonly value: string }
  | { readonly case: "toolCall"; readonly value: Call };

/** What the model wrote. Parts of kinds that this client does not know are left out. */
export interface Written<Call = pb.ToolCall> {
  /** Its text alone, without reasoning and calls. */
  readonly text: string;
  /** What the model thought, without its marks. */
  readonly reasoning: string;
  readonly toolCalls: readonly Call[];
  /** Text, reasoning and calls, in the order in which the model wrote them. */
  readonly parts: readonly Part<Call>[];
  readonly tokenIds: readonly number[];
  /** One for each token, with the option `tokenDetails` or `topLogprobs`. */
  readonly details: readonly pb.TokenDetail[];
  /** What each step verified, with the option `draftTrees`. */
  readonly draftTrees: readonly pb.DraftTree[];
}

/** One of several answers to the same prompt, as in `Completion`. */
export interface Sample extends Written, SampleResult {}

/**
 * A whole answer. With several samples, what was written and how it ended are those of the first one; `samples` contains
 * all of them, and usage, timings and drafting cover all of them.
 */
export interface Completion extends Omit<Sample, "usage"> {
  readonly samples: readonly Sample[];
  readonly requestId: string;
  readonly usage: pb.Usage;
  readonly timings: pb.Timings;
  readonly drafting: pb.DraftStatistics;
  /** What the server said when it admitted the request, such as the model and the strategy. */
  readonly started: pb.Started;
}

/** What one sample has written since its last delta. A piece of a call has its id and name if it is the first of it. */
export interface Delta extends Written<pb.ToolCallDelta> {
  /** Index of the sample, from 0. */
  readonly sample: number;
  /** In the last delta of the sample, unless the server sends deltas at a fixed cadence. */
  readonly result: SampleResult | undefined;
}

/**
 * One answer as it is generated: deltas to iterate over. The request is sent when the loop begins, and cancelled when it
 * is left early.
 */
export class GenerationStream implements AsyncIterable<Delta> {
  readonly requestId: string;
  /** Set when the server has admitted the request. */
  started: pb.Started | undefined;
  #finished: pb.Finished | undefined;
  readonly #scope = new AbortController();
  readonly #received: pb.Delta[] = [];
  readonly #deltas: AsyncGenerator<Delta, undefined, undefined>;
  #error: unknown;

  /** @internal `open` sends the request, which aborting the controller cancels. */
  constructor(requestId: string, open: (scope: AbortController) => AsyncIterable<pb.GenerateStreamResponse>) {
    this.requestId = requestId;
    this.#deltas = this.#read(open(this.#scope));
  }

  /** @throws StatusError the request failed; `RequestCancelledError` after `cancel`. */
  [Symbol.asyncIterator](): AsyncIterator<Delta, undefined, undefined> {
    return this.#deltas;
  }

  /** Cancels the request on client and server; no effect after its end. `reason` is the cause of the error. */
  cancel(reason?: unknown): void {
    this.#scope.abort(reason);
  }

  /** The whole answer; reads the rest of the stream first. Throws `StatusError`. */
  async completion(): Promise<Completion> {
    while (!(await this.#deltas.next()).done);
    if (!this.started || !this.#finished) {
      throw this.#error ?? cancelledError(this.requestId, this.#scope.signal.reason);
    }
    return completionOf(joined(this.started, this.#received, this.#finished), this.requestId);
  }

  /** Ignores events of unknown kinds, and deltas that keep up a cadence. */
  async *#read(events: AsyncIterable<pb.GenerateStreamResponse>): AsyncGenerator<Delta, undefined, undefined> {
    try {
      for await (const { event } of events) {
        if (event.case === "started") {
          this.started = event.value;
        } else if (event.case === "finished") {
          this.#finished = event.value;
        } else if (
          event.case &&
          (event.value.tokenIds.length > 0 || event.value.parts.length > 0 || event.value.result)
        ) {
          const { sample, result } = event.value;
          this.#received.push(event.value);
          yield { sample, ...writtenOf<pb.ToolCallDelta>(event.value), result: result && resultOf(result) };
        }
      }
      if (!this.started || !this.#finished) {
        const message = `the server ended the stream without ${this.started ? "Finished" : "Started"}`;
        throw new InternalError(message, { code: "INTERNAL", requestId: this.requestId });
      }
    } catch (error) {
      this.#error = error;
      throw error;
    }
  }
}

/** @throws InternalError a part is missing that every answer has. */
export function completionOf(response: pb.GenerateResponse, requestId: string): Completion {
  const { started, usage, timings, drafting } = response;
  const samples = response.answers.map((answer) => ({ ...writtenOf<pb.ToolCall>(answer), ...resultOf(answer.result) }));
  const [first] = samples;
  if (!started || !first) {
    const missing = started ? "a sample" : "Started";
    throw new InternalError(`the server sent an answer without ${missing}`, { code: "INTERNAL", requestId });
  }
  return {
    ...first,
    samples,
    requestId: started.requestId,
    usage: usage ?? create(pb.UsageSchema),
    timings: timings ?? create(pb.TimingsSchema),
    drafting: drafting ?? create(pb.DraftStatisticsSchema),
    started,
  };
}

/** What `Generate` would have answered. */
function joined(started: pb.Started, received: pb.Delta[], { samples, ...totals }: pb.Finished): pb.GenerateResponse {
  const answers = samples.map((result, index) => {
    const deltas = received.filter((delta) => delta.sample === index);
    return create(pb.AnswerSchema, {
      parts: joinedParts(deltas.flatMap((delta) => delta.parts)),
      tokenIds: deltas.flatMap((delta) => delta.tokenIds),
      details: deltas.flatMap((delta) => delta.details),
      draftTrees: deltas.flatMap((delta) => delta.draftTrees),
      result,
    });
  });
  return {
    ...create(pb.GenerateResponseSchema),
    ...totals,
    $typeName: "draftwood.v1.GenerateResponse",
    started,
    answers,
  };
}

/** Neighbours of one kind are joined, and so are the pieces of a call, which follow each other. */
function joinedParts(pieces: pb.Part[]): pb.AnswerPart[] {
  const parts: pb.AnswerPart["part"][] = [];
  let call = -1;
  for (const { part } of pieces) {
    const last = parts.at(-1);
    if (part.case === "toolCall") {
      const { index, id, name, arguments: written } = part.value;
      if (last?.case === "toolCall" && index === call) last.value.arguments += written;
      else parts.push({ case: part.case, value: create(pb.ToolCallSchema, { id, name, arguments: written }) });
      call = index;
    } else if (part.case && last?.case === part.case) {
      last.value += part.value;
    } else if (part.case) {
      parts.push({ ...part });
    }
  }
  return parts.map((part) => create(pb.AnswerPartSchema, { part }));
}

type Message<Call> = Pick<pb.Delta | pb.Answer, "tokenIds" | "details" | "draftTrees"> & {
  readonly parts: readonly { readonly part: Part<Call> | { readonly case: undefined } }[];
};

function writtenOf<Call>({ parts: wrapped, tokenIds, details, draftTrees }: Message<Call>): Written<Call> {
  const parts = wrapped.flatMap(({ part }) => (part.case ? [part] : []));
  const textOf = (kind: "text" | "reasoning") => parts.map((part) => (part.case === kind ? part.value : "")).join("");
  const toolCalls = parts.flatMap((part) => (part.case === "toolCall" ? [part.value] : []));
  return { text: textOf("text"), reasoning: textOf("reasoning"), toolCalls, parts, tokenIds, details, draftTrees };
}

function resultOf(end: pb.SampleResult = create(pb.SampleResultSchema)): SampleResult {
  return {
    finishReason: REASONS[end.reason] ?? "unknown",
    matchedStop: end.matchedStop.value,
    seed: end.seed,
    usage: end.usage ?? create(pb.SampleUsageSchema),
  };
}
