/** One answer as it is generated. */

import type { ClientReadableStream, ServiceError } from "@grpc/grpc-js";
import type { GenerateResponse } from "./gen/draftwood/v1/generation_pb.js";
import { Answer } from "./response.js";
import type { Completion, Delta, Finished, Started } from "./results.js";
import { cancelledError } from "./status.js";

/** What a stream needs of its client. */
export interface Call {
  readonly requestId: string;
  readonly signal: AbortSignal | undefined;
  /** Sends the request. */
  open(): Promise<ClientReadableStream<GenerateResponse>>;
  /** The typed form of gRPC's error. */
  error(error: ServiceError): Error;
}

/**
 * One answer as it is generated: deltas to iterate over. Returned by `Client.stream`.
 *
 * The request is sent by the first `next()`. Leaving a `for await` loop early cancels it.
 */
export class GenerationStream implements AsyncIterableIterator<Delta, undefined, undefined> {
  readonly #call: Call;
  readonly #answer = new Answer();
  #events: Promise<AsyncIterator<GenerateResponse>> | undefined;
  #rpc: ClientReadableStream<GenerateResponse> | undefined;
  #error: ServiceError | undefined;
  #cancelled: { readonly cause: unknown } | undefined;

  constructor(call: Call) {
    this.#call = call;
  }

  /** Set when the server has admitted the request. */
  get started(): Started | undefined {
    return this.#answer.started;
  }

  /** Set when the answer is complete. */
  get finished(): Finished | undefined {
    return this.#answer.finished;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /**
   * The next delta.
   *
   * @throws StatusError the request failed; `RequestCancelledError` after `cancel`.
   */
  async next(): Promise<IteratorResult<Delta, undefined>> {
    this.#events ??= this.#start();
    const events = await this.#events;
    try {
      for (let event = await events.next(); !event.done; event = await events.next()) {
        const delta = this.#answer.take(event.value);
        if (delta) {
          return { done: false, value: delta };
        }
      }
    } catch (error) {
      this.#error ??= error as ServiceError;
    }
    if (this.#error) {
      throw this.#failure(this.#error);
    }
    this.#answer.checkComplete();
    return { done: true, value: undefined };
  }

  /** Cancels the request, as `for await` does when its loop is left early. */
  async return(): Promise<IteratorReturnResult<undefined>> {
    this.cancel();
    return { done: true, value: undefined };
  }

  /** Cancels the request on client and server; no effect after its end. `reason` is the cause of the error. */
  cancel(reason?: unknown): void {
    this.#cancelled ??= { cause: reason };
    this.#rpc?.cancel();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.cancel();
  }

  /**
   * The whole answer; reads the rest of the stream first.
   *
   * @throws StatusError the request failed.
   */
  async completion(): Promise<Completion> {
    for (let delta = await this.next(); !delta.done; delta = await this.next());
    return this.#answer.completion();
  }

  async #start(): Promise<AsyncIterator<GenerateResponse>> {
    const { signal } = this.#call;
    if (signal?.aborted) {
      this.cancel(signal.reason);
    }
    const rpc = this.#cancelled ? undefined : await this.#call.open();
    if (!rpc || this.#cancelled) {
      rpc?.on("error", () => {}).cancel();
      throw this.#cancellation();
    }
    this.#rpc = rpc;
    const abort = () => this.cancel(signal?.reason);
    signal?.addEventListener("abort", abort, { once: true });
    // An error that comes while nobody waits for an event is kept for the next one who does.
    rpc.on("error", (error: ServiceError) => {
      this.#error ??= error;
    });
    rpc.on("status", () => signal?.removeEventListener("abort", abort));
    return rpc[Symbol.asyncIterator]();
  }

  #failure(error: ServiceError): Error {
    return this.#cancelled ? this.#cancellation() : this.#call.error(error);
  }

  #cancellation(): Error {
    return cancelledError(this.#call.requestId, this.#cancelled?.cause);
  }
}
