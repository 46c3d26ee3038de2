/** The client. */

import { randomUUID } from "node:crypto";
import { create } from "@bufbuild/protobuf";
import {
  Client as Channel,
  type ClientReadableStream,
  type ClientUnaryCall,
  type Metadata,
  type ServiceError,
} from "@grpc/grpc-js";
import { type ClientOptions, Connection, DEFAULT_TARGET } from "./connection.js";
import { ClientClosedError, DeadlineError, type StatusError, UnavailableError } from "./errors.js";
import {
  DetokenizeRequestSchema,
  GenerationService,
  GetModelInfoRequestSchema,
} from "./gen/draftwood/v1/generation_pb.js";
import {
  type ChatMessage,
  type GenerateOptions,
  generateRequest,
  type Prompt,
  timeLimit,
  tokenIds,
  tokenizeRequest,
} from "./request.js";
import { modelInfo, tokenization } from "./response.js";
import type { Completion, ModelInfo, Tokenization } from "./results.js";
import { type Rpc, rpc } from "./rpc.js";
import { cancelledError, notReadyError, statusError } from "./status.js";
import { GenerationStream } from "./stream.js";

/** Options of any request. */
export interface CallOptions {
  /** Milliseconds for the whole answer, retries included; the client's by default, Infinity for no deadline. */
  readonly timeoutMs?: number | undefined;
  /** Cancels the request when it is aborted. */
  readonly signal?: AbortSignal | undefined;
}

const GENERATE = rpc(GenerationService.method.generate);
const TOKENIZE = rpc(GenerationService.method.tokenize);
const DETOKENIZE = rpc(GenerationService.method.detokenize);
const MODEL_INFO = rpc(GenerationService.method.getModelInfo);

/** Between two questions of `waitUntilReady`, each of which is retried as the client's policy says. Not tuned. */
const POLL_MS = 200;

/**
 * A connection to a Draftwood server. One client serves any number of requests at once; it connects with the first.
 *
 *     const client = new Client("127.0.0.1:50051", { tenant: "acme" });
 *     const completion = await client.generate([{ role: "user", content: "where is my order?" }]);
 */
export class Client {
  readonly #connection: Connection;
  readonly #channel: Channel;
  /** Requests under way. */
  readonly #calls = new Set<ClientUnaryCall | ClientReadableStream<unknown>>();
  #closed = false;

  /**
   * @param target "host:port", or any gRPC name; "dns:///host:port" distributes requests over all of its addresses with
   *   a server that is ready.
   * @throws ArgumentError an argument is invalid.
   */
  constructor(target: string = DEFAULT_TARGET, options: ClientOptions = {}) {
    this.#connection = new Connection(target, options);
    const { channelCredentials, channelOptions } = this.#connection;
    this.#channel = new Channel(target, channelCredentials, channelOptions);
  }

  /** Cancels requests under way and closes the connection. May be called twice. */
  close(): void {
    this.#closed = true;
    for (const call of this.#calls) {
      call.cancel();
    }
    this.#channel.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /**
   * The whole answer.
   *
   * @throws ArgumentError an argument is invalid; nothing was sent.
   * @throws StatusError the request failed; see `errors` for the types.
   */
  async generate(prompt: Prompt, options: GenerateOptions & CallOptions = {}): Promise<Completion> {
    return this.stream(prompt, options).completion();
  }

  /**
   * The answer as it is generated: deltas to iterate over.
   *
   *     for await (const delta of client.stream("Once upon a time", { maxTokens: 200 })) {
   *       process.stdout.write(delta.text);
   *     }
   *
   * @throws ArgumentError an argument is invalid; nothing was sent. Errors of the request come while iterating.
   */
  stream(prompt: Prompt, options: GenerateOptions & CallOptions = {}): GenerationStream {
    const { timeoutMs, signal, ...own } = options;
    const limit = this.#limit(timeoutMs);
    const requestId = own.requestId || randomUUID().replaceAll("-", "");
    const request = generateRequest(prompt, { ...own, tenant: own.tenant ?? this.#connection.tenant, requestId });
    return new GenerationStream({
      requestId,
      signal,
      open: async () => {
        const deadline = deadlineAfter(limit);
        const metadata = await this.#metadata();
        const { path, serialize, deserialize } = GENERATE;
        return this.#tracked(
          this.#channel.makeServerStreamRequest(path, serialize, deserialize, request, metadata, { deadline }),
        );
      },
      error: (error) => statusError(error, this.#connection.target, limit, requestId),
    });
  }

  /** The token ids of a prompt, as `generate` reads it. Throws `ArgumentError`, `StatusError`. */
  async tokenize(input: string | readonly ChatMessage[], options: CallOptions = {}): Promise<Tokenization> {
    return tokenization(await this.#unary(TOKENIZE, tokenizeRequest(input), options));
  }

  /** The text of token ids. Throws `ArgumentError`, `StatusError`. */
  async detokenize(
    ids: readonly number[],
    options: CallOptions & { readonly includeSpecialTokens?: boolean } = {},
  ): Promise<string> {
    const { includeSpecialTokens = false } = options;
    const request = create(DetokenizeRequestSchema, { tokenIds: tokenIds("ids", ids), includeSpecialTokens });
    return (await this.#unary(DETOKENIZE, request, options)).text;
  }

  /** The served model and its limits. Throws `StatusError`. */
  async modelInfo(options: CallOptions = {}): Promise<ModelInfo> {
    return modelInfo(await this.#unary(MODEL_INFO, create(GetModelInfoRequestSchema), options));
  }

  /**
   * Waits for a server that is starting or loading its model.
   *
   * @throws DeadlineError the server was not ready within `timeoutMs`, by default a minute; the message contains the
   *   last error.
   * @throws StatusError the server answered with an error other than UNAVAILABLE.
   */
  async waitUntilReady({ timeoutMs = 60_000, signal }: CallOptions = {}): Promise<ModelInfo> {
    const limit = timeLimit("timeoutMs", timeoutMs) ?? Number.POSITIVE_INFINITY;
    const end = performance.now() + limit;
    for (let refusal: StatusError | undefined; ; ) {
      try {
        return await this.modelInfo({ timeoutMs: Math.max(1, end - performance.now()), signal });
      } catch (error) {
        if (!(error instanceof UnavailableError || error instanceof DeadlineError)) {
          throw error;
        }
        refusal = error instanceof UnavailableError ? error : (refusal ?? error);
        if (error instanceof DeadlineError || end - performance.now() <= POLL_MS) {
          throw notReadyError(this.#connection.target, limit, refusal);
        }
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  async #unary<Request, Response>(
    { path, serialize, deserialize }: Rpc<Request, Response>,
    request: Request,
    { timeoutMs, signal }: CallOptions,
  ): Promise<Response> {
    const limit = this.#limit(timeoutMs);
    const deadline = deadlineAfter(limit);
    const metadata = await this.#metadata();
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(cancelledError("", signal.reason));
        return;
      }
      const abort = () => call.cancel();
      const ended = (error: ServiceError | null, response?: Response) => {
        signal?.removeEventListener("abort", abort);
        if (response !== undefined && !error) {
          resolve(response);
        } else {
          const failure = error && statusError(error, this.#connection.target, limit, "");
          reject(signal?.aborted ? cancelledError("", signal.reason) : failure);
        }
      };
      const call = this.#tracked(
        this.#channel.makeUnaryRequest(path, serialize, deserialize, request, metadata, { deadline }, ended),
      );
      signal?.addEventListener("abort", abort, { once: true });
    });
  }

  #tracked<Call extends ClientUnaryCall | ClientReadableStream<unknown>>(call: Call): Call {
    this.#calls.add(call);
    call.on("status", () => this.#calls.delete(call));
    return call;
  }

  #limit(timeoutMs: number | undefined): number | undefined {
    return timeoutMs === undefined ? this.#connection.timeoutMs : timeLimit("timeoutMs", timeoutMs);
  }

  /** @throws ClientClosedError the client was closed. */
  async #metadata(): Promise<Metadata> {
    const metadata = await this.#connection.metadata();
    if (this.#closed) {
      throw new ClientClosedError(`the client of ${this.#connection.target} is closed`);
    }
    return metadata;
  }
}

function deadlineAfter(limit: number | undefined): number {
  return limit === undefined ? Number.POSITIVE_INFINITY : Date.now() + limit;
}
