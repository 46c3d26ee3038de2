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

type Event = MessageInitShape<typeof pb.GenerateResponseSchema>;
/** What an attempt is answered: texts, and then Finished, nothing more, nothing until it is cancelled, or an error. */
export type Answer = { texts?: string[]; end?: "without Finished" | "hangs" | ConnectError };

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
  /** What came, one for each attempt at `Generate`. */
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

  async *#generate({ requestId, tenant }: pb.GenerateRequest, { signal }: HandlerContext): AsyncGenerator<Event> {
    const { texts = [], end } = this.script[Math.min(this.requests.length, this.script.length) - 1] ?? {};
    const started = { requestId, tenant: tenant || "default", model: "fake", seed: 2n ** 64n - 1n };
    if (texts.length > 0) yield { event: { case: "started", value: started } };
    for (const text of texts) yield { event: { case: "delta", value: { text, tokenIds: [text.length] } } };
    if (end instanceof ConnectError) throw end;
    if (end === "hangs") {
      if (!signal.aborted) await once(signal, "abort");
      this.events.emit("cancelled");
      throw signal.reason;
    }
    const drafting = { strategy: "trie", meanAcceptanceLength: 1.5 };
    const finished = { reason: pb.FinishReason.STOP, usage: { promptTokens: 3 }, drafting };
    if (!end) yield { event: { case: "finished", value: finished } };
  }
}
