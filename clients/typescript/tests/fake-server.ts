/** A scripted server. */

import { EventEmitter, once } from "node:events";
import * as http2 from "node:http2";
import type { AddressInfo } from "node:net";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, type HandlerContext, type Interceptor } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { TenantService } from "../src/gen/draftwood/admin/v1/tenants_pb.js";
import * as pb from "../src/gen/draftwood/v1/generation_pb.js";
import { MemoryService } from "../src/gen/draftwood/v1/memory_pb.js";
import * as rpc from "../src/gen/google/rpc/error_details_pb.js";

type Whole = MessageInitShape<typeof pb.GenerateResponseSchema>;
type Event = MessageInitShape<typeof pb.GenerateStreamResponseSchema>;
type Piece = NonNullable<MessageInitShape<typeof pb.PartSchema>["part"]>;
/** What is the same in both forms of an answer. */
const TOTALS = { usage: { promptTokens: 3, completionTokens: 4 }, drafting: { meanAcceptanceLength: 1.5 } };
/**
 * What an attempt is answered: what every sample writes, reasoning before texts before calls, and then Finished, nothing
 * more, nothing until it is cancelled, or an error.
 */
export type Answer = {
  reasoning?: string[];
  texts?: string[];
  calls?: { id: string; name: string; arguments: string }[];
  reason?: pb.FinishReason;
  end?: "without Finished" | "hangs" | ConnectError;
};

const failure = (code: Code, message: string, pushback: string, details: object[]) =>
  new ConnectError(message, code, { "grpc-retry-pushback-ms": pushback }, details as never);
const reason = (reason: string) => ({ desc: rpc.ErrorInfoSchema, value: { reason, metadata: { request_id: "r-1" } } });
const field = {
  desc: rpc.BadRequestSchema,
  value: { fieldViolations: [{ field: "temperature", description: "low" }] },
};
const quota = { desc: rpc.QuotaFailureSchema, value: { violations: [{ subject: "acme" }] } };
const retry = { desc: rpc.RetryInfoSchema, value: { retryDelay: durationFromMs(2500) } };
export const full = (pushback: string) => failure(Code.Unavailable, "queue is full", pushback, [reason("QUEUE_FULL")]);
export const invalid = failure(Code.InvalidArgument, "temperature: -1", "-1", [reason("INVALID_VALUE"), field]);
export const overQuota = failure(Code.ResourceExhausted, "too many", "-1", [quota, retry]);

export class FakeServer {
  /** Attempt n gets `script[n]`; attempts beyond the script get its last answer. */
  script: Answer[] = [{ texts: ["It is", " here."] }];
  /** What came, one for each attempt at `Generate` or `GenerateStream`. */
  requests: pb.GenerateRequest[] = [];
  /** The headers of each attempt at any method. */
  readonly headers: Headers[] = [];
  /** "cancelled": the client has cancelled an attempt that hangs. */
  readonly events = new EventEmitter();
  /** So many calls of other methods fail with UNAVAILABLE. */
  unavailable = 0;
  readonly #server: http2.Http2Server;
  readonly #sessions = new Set<http2.Http2Session>();

  static async start(tls?: http2.SecureServerOptions): Promise<FakeServer> {
    const fake = new FakeServer(tls);
    await once(fake.#server.listen(0, "127.0.0.1"), "listening");
    return fake;
  }

  private constructor(tls?: http2.SecureServerOptions) {
    const record: Interceptor = (next) => (request) => {
      this.headers.push(request.header);
      if (!request.stream && this.unavailable-- > 0) throw new ConnectError("the model is loading", Code.Unavailable);
      return next(request);
    };
    const handler = connectNodeAdapter({
      interceptors: [record],
      routes: (router) => {
        router.service(pb.GenerationService, {
          generate: (request, context) => {
            this.requests.push(request);
            return this.#generate(request, context);
          },
          generateStream: (request, context) => {
            this.requests.push(request);
            return this.#stream(request, context);
          },
          getModelInfo: () => ({ model: "fake", parameters: 6_000_000n }),
        });
        router.service(TenantService, {
          getTenant: ({ name }) => ({ name, etag: "1" }),
          updateTenant: ({ tenant }) => tenant ?? {},
        });
        router.service(MemoryService, {
          async *warmMemory(requests) {
            for await (const { texts } of requests) yield { texts: BigInt(texts.length) };
          },
          getMemoryStatistics: () => ({ tenants: [{ tenant: "acme", tokens: 16n }] }),
        });
      },
    });
    this.#server = tls ? http2.createSecureServer(tls, handler) : http2.createServer(handler);
    this.#server.on("session", (session) => this.#sessions.add(session));
  }

  get target(): string {
    return `127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  stop(): void {
    for (const session of this.#sessions) session.destroy();
    this.#server.close();
  }

  /** The answer to this attempt. */
  get #answer(): Answer {
    return this.script[Math.min(this.requests.length, this.script.length) - 1] ?? {};
  }

  async #generate(request: pb.GenerateRequest, { signal }: HandlerContext): Promise<Whole> {
    const { reasoning = [], texts = [], calls = [], end } = this.#answer;
    const results = resultsOf(request, this.#answer);
    if (end instanceof ConnectError) throw end;
    if (end === "hangs") await this.#cancelled(signal);
    const answers = results.map((result, index) => ({
      parts: [
        ...(reasoning.length > 0 ? [{ part: { case: "reasoning" as const, value: reasoning.join("") } }] : []),
        ...(texts.length > 0 ? [{ part: { case: "text" as const, value: texts.join("") } }] : []),
        ...calls.map((call) => ({ part: { case: "toolCall" as const, value: call } })),
      ],
      ...tokensOf(piecesOf(this.#answer), index),
      result,
    }));
    return { answers, ...(end ? {} : { started: startedOf(request) }), ...TOTALS };
  }

  /** A delta for each piece, of all samples in turn; the last one has the result, and one before it has nothing at all. */
  async *#stream(request: pb.GenerateRequest, { signal }: HandlerContext): AsyncGenerator<Event> {
    const { end } = this.#answer;
    const [pieces, results] = [piecesOf(this.#answer), resultsOf(request, this.#answer)];
    if (pieces.length > 0) yield { event: { case: "started", value: startedOf(request) } };
    for (const part of pieces) {
      for (const sample of results.keys()) {
        yield { event: { case: "delta", value: { sample, parts: [{ part }], ...tokensOf([part], sample) } } };
      }
    }
    if (pieces.length > 0) yield { event: { case: "delta", value: {} } };
    if (end instanceof ConnectError) throw end;
    if (end === "hangs") await this.#cancelled(signal);
    for (const [sample, result] of results.entries()) yield { event: { case: "delta", value: { sample, result } } };
    if (!end) yield { event: { case: "finished", value: { samples: results, ...TOTALS } } };
  }

  async #cancelled(signal: AbortSignal): Promise<never> {
    if (!signal.aborted) await once(signal, "abort");
    this.events.emit("cancelled");
    throw signal.reason;
  }
}

function startedOf({ requestId, tenant }: pb.GenerateRequest) {
  return { requestId, tenant: tenant || "default", model: "fake", strategy: "trie" };
}

/** One for each sample. */
function resultsOf({ sampling }: pb.GenerateRequest, { calls, reason }: Answer) {
  return Array.from({ length: sampling?.n ?? 1 }, (_, index) => ({
    reason: reason ?? (calls ? pb.FinishReason.TOOL_CALLS : pb.FinishReason.STOP),
    matchedStop: { case: "stopString" as const, value: "\n" },
    usage: { completionTokens: 2, reasoningTokens: index },
    ...(sampling?.seed !== undefined && { seed: sampling.seed + BigInt(index) }),
  }));
}

/** What a sample writes, in pieces: each call in two. */
function piecesOf({ reasoning = [], texts = [], calls = [] }: Answer): Piece[] {
  return [
    ...reasoning.map((value) => ({ case: "reasoning" as const, value })),
    ...texts.map((value) => ({ case: "text" as const, value })),
    ...calls.flatMap(({ id, name, arguments: written }, index) => [
      { case: "toolCall" as const, value: { index, id, name, arguments: written.slice(0, 3) } },
      { case: "toolCall" as const, value: { index, arguments: written.slice(3) } },
    ]),
  ];
}

/** A token for each piece, whose id is its length, or 100 for a piece of a call, and the number of the sample. */
function tokensOf(pieces: Piece[], sample: number) {
  const tokenIds = pieces.map((piece) => (piece.case === "toolCall" ? 100 : (piece.value?.length ?? 0)) + sample);
  return { tokenIds, details: tokenIds.map((tokenId) => ({ tokenId, bytes: Buffer.from([tokenId]), drafted: true })) };
}
