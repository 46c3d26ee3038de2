/** The clients. */

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { Connection, type ServiceClient } from "./connection.js";
import { DeadlineError, UnavailableError } from "./errors.js";
import { AuditService } from "./gen/draftwood/admin/v1/audit_pb.js";
import { ExperimentService } from "./gen/draftwood/admin/v1/experiments_pb.js";
import { StatusService } from "./gen/draftwood/admin/v1/status_pb.js";
import { TenantService } from "./gen/draftwood/admin/v1/tenants_pb.js";
import * as pb from "./gen/draftwood/v1/generation_pb.js";
import { MemoryService } from "./gen/draftwood/v1/memory_pb.js";
import { type CallOptions, type ClientOptions, type ConnectionOptions, timeLimit, variable } from "./options.js";
import { type ChatMessage, conversation, encode, type GenerateOptions, plainPrompt, requestOf } from "./request.js";
import { type Completion, completionOf, GenerationStream } from "./stream.js";

const METHODS = pb.GenerationService.method;
type Call = { request: pb.GenerateRequest; call: CallOptions & { readonly requestId: string } };
/** Between two questions of `waitUntilReady`, each of which is retried as any request. */
const POLL_MS = 200;

/** A connection to a Draftwood server. One client serves any number of requests at once; it connects with the first. */
export class Client {
  readonly #connection: Connection;
  readonly #tenant: string | undefined;

  /**
   * @param target "host:port". By default DRAFTWOOD_TARGET of the environment, or 127.0.0.1:50051.
   * @throws ArgumentError an argument is invalid.
   */
  constructor(target?: string, options: ClientOptions = {}) {
    this.#tenant = options.tenant ?? variable("DRAFTWOOD_TENANT");
    this.#connection = new Connection(target, options);
  }

  /** Cancels requests under way and closes the connection. May be called twice. */
  close(): void {
    this.#connection.close();
  }

  /**
   * The whole answer to a conversation; a string is one message of the user. If the request fails or is cancelled,
   * what was written is lost. The server refuses options whose token details could exceed 4 MiB. Streams have neither limit.
   *
   * @throws ArgumentError an argument is invalid; nothing was sent.
   * @throws StatusError the request failed.
   */
  async chat(messages: string | readonly ChatMessage[], options?: GenerateOptions & CallOptions): Promise<Completion> {
    return this.#generate(this.#chat(messages, options));
  }

  /** The continuation of text or token ids as they are, without the model's chat template. Throws as `chat`. */
  async complete(prompt: string | readonly number[], options?: GenerateOptions & CallOptions): Promise<Completion> {
    return this.#generate(this.#call(plainPrompt(prompt), options));
  }

  /** The answer of `chat` as it is generated. Throws `ArgumentError`; errors of the request come while iterating. */
  streamChat(messages: string | readonly ChatMessage[], options?: GenerateOptions & CallOptions): GenerationStream {
    return this.#stream(this.#chat(messages, options));
  }

  /** The continuation of `complete` as it is generated; otherwise as `streamChat`. */
  streamComplete(prompt: string | readonly number[], options?: GenerateOptions & CallOptions): GenerationStream {
    return this.#stream(this.#call(plainPrompt(prompt), options));
  }

  /** The token ids of a text, or of a conversation as `chat` sends it. Throws as `chat`. */
  async tokenize(input: string | readonly ChatMessage[], options?: CallOptions): Promise<pb.TokenizeResponse> {
    const request = encode(pb.TokenizeRequestSchema, typeof input === "string" ? { text: input } : conversation(input));
    return this.#connection.unary(METHODS.tokenize, request, options);
  }

  /** The text of token ids. Throws as `chat`. */
  async detokenize(
    ids: readonly number[],
    options: CallOptions & { readonly includeSpecialTokens?: boolean } = {},
  ): Promise<string> {
    const { includeSpecialTokens, ...call } = options;
    const request = encode(pb.DetokenizeRequestSchema, { tokenIds: ids, includeSpecialTokens });
    return (await this.#connection.unary(METHODS.detokenize, request, call)).text;
  }

  /** The served model and its limits. Throws `StatusError`. */
  async modelInfo(options?: CallOptions): Promise<pb.GetModelInfoResponse> {
    return this.#connection.unary(METHODS.getModelInfo, {}, options);
  }

  /** Waits for a server that is starting or loading its model, by default a minute; then throws its last error. */
  async waitUntilReady({ timeoutMs = 60_000, ...options }: CallOptions = {}): Promise<pb.GetModelInfoResponse> {
    const end = performance.now() + timeLimit(timeoutMs);
    for (let refusal: UnavailableError | undefined; ; await sleep(POLL_MS)) {
      try {
        return await this.modelInfo({ ...options, timeoutMs: Math.max(1, Math.ceil(end - performance.now())) });
      } catch (error) {
        if (error instanceof DeadlineError) throw refusal ?? error;
        if (!(error instanceof UnavailableError) || end - performance.now() <= POLL_MS) throw error;
        refusal = error;
      }
    }
  }

  #chat(messages: string | readonly ChatMessage[], { tools, ...options }: GenerateOptions & CallOptions = {}) {
    return this.#call(conversation(messages, tools), options);
  }

  #call(prompt: object, { timeoutMs, signal, metadata, ...generation }: GenerateOptions & CallOptions = {}) {
    const requestId = generation.requestId || randomUUID().replaceAll("-", "");
    const request = requestOf(prompt, { ...generation, tenant: generation.tenant ?? this.#tenant, requestId });
    const limit = timeLimit(timeoutMs ?? this.#connection.timeoutMs);
    return { request, call: { timeoutMs: limit, signal, metadata, requestId } };
  }

  async #generate({ request, call }: Call): Promise<Completion> {
    return completionOf(await this.#connection.unary(METHODS.generate, request, call), call.requestId);
  }

  #stream({ request, call }: Call): GenerationStream {
    const open = (scope: AbortController) => this.#connection.run(METHODS.generateStream, [request], call, scope);
    return new GenerationStream(call.requestId, open);
  }
}

/**
 * A connection to a server's administrative services, whose methods and fields the reference of the protocol lists. Every
 * method throws `StatusError`. No call is retried: a change that is sent twice could be made twice. Streams have no
 * deadline unless `timeoutMs` sets one.
 */
export class AdminClient {
  readonly #connection: Connection;
  readonly tenants: ServiceClient<typeof TenantService>;
  readonly experiments: ServiceClient<typeof ExperimentService>;
  readonly audit: ServiceClient<typeof AuditService>;
  readonly status: ServiceClient<typeof StatusService>;
  readonly memory: ServiceClient<typeof MemoryService>;

  /** @throws ArgumentError an argument is invalid. */
  constructor(target?: string, options: ConnectionOptions = {}) {
    this.#connection = new Connection(target, { ...options, maxAttempts: 1 });
    this.tenants = this.#connection.service(TenantService);
    this.experiments = this.#connection.service(ExperimentService);
    this.audit = this.#connection.service(AuditService);
    this.status = this.#connection.service(StatusService);
    this.memory = this.#connection.service(MemoryService);
  }

  /** Cancels calls under way and closes the connection. May be called twice. */
  close(): void {
    this.#connection.close();
  }
}
