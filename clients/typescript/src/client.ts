/** The client. */

import { randomUUID } from "node:crypto";
import { create } from "@bufbuild/protobuf";
import { type CallOptions, Calls } from "./calls.js";
import type { ClientOptions } from "./connection.js";
import { read } from "./environment.js";
import { DeadlineError, type StatusError, UnavailableError } from "./errors.js";
import {
  DetokenizeRequestSchema,
  GenerationService,
  GetModelInfoRequestSchema,
} from "./gen/draftwood/v1/generation_pb.js";
import {
  type ChatMessage,
  conversation,
  type GenerateOptions,
  generateRequest,
  type Prompt,
  plainPrompt,
  timeLimit,
  tokenIds,
  tokenizeRequest,
} from "./request.js";
import { modelInfo, tokenization } from "./response.js";
import type { Completion, ModelInfo, Tokenization } from "./results.js";
import { rpc } from "./rpc.js";
import { notReadyError, statusError } from "./status.js";
import { GenerationStream } from "./stream.js";

const GENERATE = rpc(GenerationService.method.generate);
const TOKENIZE = rpc(GenerationService.method.tokenize);
const DETOKENIZE = rpc(GenerationService.method.detokenize);
const MODEL_INFO = rpc(GenerationService.method.getModelInfo);

/** Between two questions of `waitUntilReady`, each of which is retried as the client's policy says. */
const POLL_MS = 200;

/**
 * A connection to a Draftwood server. One client serves any number of requests at once; it connects with the first.
 *
 *     const client = new Client("127.0.0.1:50051", { tenant: "acme" });
 *     const answer = await client.chat("where is my order?");
 *     const story = await client.complete("Once upon a time");
 */
export class Client {
  readonly #calls: Calls;
  readonly #tenant: string | undefined;

  /**
   * @param target "host:port", or any gRPC name; "dns:///host:port" distributes requests over all of its addresses with
   *   a server that is ready. By default DRAFTWOOD_TARGET of the environment, or 127.0.0.1:50051.
   * @throws ArgumentError an argument is invalid.
   */
  constructor(target?: string, options: ClientOptions = {}) {
    const { tenant = read("DRAFTWOOD_TENANT"), retry = {}, ...others } = options;
    this.#tenant = tenant;
    this.#calls = new Calls(target, others, retry);
  }

  /** Cancels requests under way and closes the connection. May be called twice. */
  close(): void {
    this.#calls.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /**
   * The whole answer to a conversation; a string is one message of the user.
   *
   * @throws ArgumentError an argument is invalid; nothing was sent.
   * @throws StatusError the request failed; see `errors` for the types.
   */
  async chat(
    messages: string | readonly ChatMessage[],
    options: GenerateOptions & CallOptions = {},
  ): Promise<Completion> {
    return this.streamChat(messages, options).completion();
  }

  /** The continuation of text or token ids as they are, without the model's chat template. Throws as `chat`. */
  async complete(prompt: string | readonly number[], options: GenerateOptions & CallOptions = {}): Promise<Completion> {
    return this.streamComplete(prompt, options).completion();
  }

  /**
   * The answer of `chat` as it is generated: deltas to iterate over.
   *
   *     for await (const delta of client.streamChat("where is my order?", { maxTokens: 200 })) {
   *       process.stdout.write(delta.text);
   *     }
   *
   * @throws ArgumentError an argument is invalid; nothing was sent. Errors of the request come while iterating.
   */
  streamChat(messages: string | readonly ChatMessage[], options: GenerateOptions & CallOptions = {}): GenerationStream {
    return this.#stream(conversation(messages), options, "messages");
  }

  /** The continuation of `complete` as it is generated; otherwise as `streamChat`. */
  streamComplete(prompt: string | readonly number[], options: GenerateOptions & CallOptions = {}): GenerationStream {
    return this.#stream(plainPrompt(prompt), options);
  }

  /** The RPC Generate: `complete` for text and token ids, `chat` for messages. For prompts of any form. */
  async generate(prompt: Prompt, options: GenerateOptions & CallOptions = {}): Promise<Completion> {
    return this.stream(prompt, options).completion();
  }

  /** The answer of `generate` as it is generated. */
  stream(prompt: Prompt, options: GenerateOptions & CallOptions = {}): GenerationStream {
    return this.#stream(prompt, options);
  }

  /** The token ids of a text, or of a conversation as `chat` sends it. Throws `ArgumentError`, `StatusError`. */
  async tokenize(input: string | readonly ChatMessage[], options: CallOptions = {}): Promise<Tokenization> {
    return tokenization(await this.#calls.unary(TOKENIZE, tokenizeRequest(input), options));
  }

  /** The text of token ids. Throws `ArgumentError`, `StatusError`. */
  async detokenize(
    ids: readonly number[],
    options: CallOptions & { readonly includeSpecialTokens?: boolean } = {},
  ): Promise<string> {
    const { includeSpecialTokens = false } = options;
    const request = create(DetokenizeRequestSchema, { tokenIds: tokenIds("ids", ids), includeSpecialTokens });
    return (await this.#calls.unary(DETOKENIZE, request, options)).text;
  }

  /** The served model and its limits. Throws `StatusError`. */
  async modelInfo(options: CallOptions = {}): Promise<ModelInfo> {
    return modelInfo(await this.#calls.unary(MODEL_INFO, create(GetModelInfoRequestSchema), options));
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
          throw notReadyError(this.#calls.connection.target, limit, refusal);
        }
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  #stream(prompt: Prompt, options: GenerateOptions & CallOptions, name = "prompt"): GenerationStream {
    const { timeoutMs, signal, metadata, ...own } = options;
    const limit = this.#calls.limit(timeoutMs);
    const requestId = own.requestId || randomUUID().replaceAll("-", "");
    const request = generateRequest(prompt, { ...own, tenant: own.tenant ?? this.#tenant, requestId }, name);
    return new GenerationStream({
      requestId,
      signal,
      open: () => this.#calls.open(GENERATE, request, limit, metadata),
      error: (error) => statusError(error, this.#calls.connection, limit, requestId),
    });
  }
}
