/** Calls on a channel, with deadline, metadata, cancellation and typed errors. */

import { Readable, type Writable } from "node:stream";
import {
  Client as Channel,
  type ClientDuplexStream,
  type ClientReadableStream,
  type ClientUnaryCall,
  type Metadata,
  type ServiceError,
} from "@grpc/grpc-js";
import { Connection, type ConnectionOptions } from "./connection.js";
import { ClientClosedError } from "./errors.js";
import { timeLimit } from "./request.js";
import type { RetryPolicy } from "./retry.js";
import type { Rpc } from "./rpc.js";
import { cancelledError, statusError } from "./status.js";

/** Options of any request. */
export interface CallOptions {
  /**
   * Milliseconds for the whole answer, retries included; the client's by default, Infinity for no deadline. The server
   * ends a request without one after its own `--default-timeout`.
   */
  readonly timeoutMs?: number | undefined;
  /** Cancels the request when it is aborted. */
  readonly signal?: AbortSignal | undefined;
  /** Headers of this request alone, beside those of the client; names are lower-cased. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
}

type Running = ClientUnaryCall | ClientReadableStream<unknown> | ClientDuplexStream<unknown, unknown>;

/** A channel, and the calls under way on it. */
export class Calls {
  readonly connection: Connection;
  readonly #channel: Channel;
  readonly #running = new Set<Running>();
  #closed = false;

  /** @throws ArgumentError an argument is invalid. */
  constructor(target: string | undefined, options: ConnectionOptions, retry: RetryPolicy) {
    this.connection = new Connection(target, options, retry);
    const { channelCredentials, channelOptions } = this.connection;
    this.#channel = new Channel(this.connection.target, channelCredentials, channelOptions);
  }

  /** Cancels calls under way and closes the connection. May be called twice. */
  close(): void {
    this.#closed = true;
    for (const call of this.#running) {
      call.cancel();
    }
    this.#channel.close();
  }

  /** A call's time limit in milliseconds; undefined for none. */
  limit(timeoutMs: number | undefined): number | undefined {
    return timeoutMs === undefined ? this.connection.timeoutMs : timeLimit("timeoutMs", timeoutMs);
  }

  /** @throws StatusError the call failed. */
  async unary<Request, Response>(
    { path, serialize, deserialize }: Rpc<Request, Response>,
    request: Request,
    { timeoutMs, signal, metadata: own }: CallOptions,
  ): Promise<Response> {
    const limit = this.limit(timeoutMs);
    const deadline = deadlineAfter(limit);
    const metadata = await this.#metadata(own);
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
          const failure = error && statusError(error, this.connection, limit, "");
          reject(signal?.aborted ? cancelledError("", signal.reason) : failure);
        }
      };
      const call = this.#tracked(
        this.#channel.makeUnaryRequest(path, serialize, deserialize, request, metadata, { deadline }, ended),
      );
      signal?.addEventListener("abort", abort, { once: true });
    });
  }

  /** Begins a call whose responses are a stream. */
  async open<Request, Response>(
    { path, serialize, deserialize }: Rpc<Request, Response>,
    request: Request,
    limit: number | undefined,
    own: CallOptions["metadata"],
  ): Promise<ClientReadableStream<Response>> {
    const deadline = deadlineAfter(limit);
    const metadata = await this.#metadata(own);
    return this.#tracked(
      this.#channel.makeServerStreamRequest(path, serialize, deserialize, request, metadata, { deadline }),
    );
  }

  /**
   * The responses of a stream, which has no deadline unless `timeoutMs` sets one. Leaving a `for await` loop cancels it.
   *
   * @throws StatusError the call failed.
   */
  async *stream<Request, Response>(
    rpc: Rpc<Request, Response>,
    request: Request,
    { timeoutMs, signal, metadata }: CallOptions,
  ): AsyncGenerator<Response, undefined, undefined> {
    const limit = timeLimit("timeoutMs", timeoutMs);
    yield* this.#responses(await this.open(rpc, request, limit, metadata), limit, signal);
  }

  /**
   * The same of a stream of requests, which is read as fast as the server takes them, and left when the call ends.
   *
   * @throws StatusError the call failed; or what `requests` threw, which ends the call.
   */
  async *exchange<Request, Response>(
    { path, serialize, deserialize }: Rpc<Request, Response>,
    requests: AsyncIterable<Request>,
    { timeoutMs, signal, metadata: own }: CallOptions,
  ): AsyncGenerator<Response, undefined, undefined> {
    const limit = timeLimit("timeoutMs", timeoutMs);
    const deadline = deadlineAfter(limit);
    const metadata = await this.#metadata(own);
    const call = this.#tracked(
      this.#channel.makeBidiStreamRequest(path, serialize, deserialize, metadata, { deadline }),
    );
    let failure: { readonly error: unknown } | undefined;
    const source = Readable.from(requests);
    source.on("error", (error) => {
      failure = { error };
      call.cancel();
    });
    call.on("status", () => source.destroy());
    source.pipe(call as Writable); // of objects
    try {
      yield* this.#responses(call, limit, signal);
    } catch (error) {
      throw failure ? failure.error : error;
    }
  }

  async *#responses<Response>(
    call: ClientReadableStream<Response> | ClientDuplexStream<unknown, Response>,
    limit: number | undefined,
    signal: AbortSignal | undefined,
  ): AsyncGenerator<Response, undefined, undefined> {
    const abort = () => call.cancel();
    signal?.addEventListener("abort", abort, { once: true });
    call.on("error", () => {}); // of a call that was left; the loop throws the others
    try {
      if (signal?.aborted) {
        call.cancel();
      }
      yield* call as AsyncIterable<Response>;
    } catch (error) {
      throw signal?.aborted
        ? cancelledError("", signal.reason)
        : statusError(error as ServiceError, this.connection, limit, "");
    } finally {
      signal?.removeEventListener("abort", abort);
      call.cancel();
    }
  }

  #tracked<Call extends Running>(call: Call): Call {
    this.#running.add(call);
    call.on("status", () => this.#running.delete(call));
    return call;
  }

  /** @throws ClientClosedError the client was closed. */
  async #metadata(own: CallOptions["metadata"]): Promise<Metadata> {
    const metadata = await this.connection.metadata(own);
    if (this.#closed) {
      throw new ClientClosedError(`the client of ${this.connection.target} is closed`);
    }
    return metadata;
  }
}

function deadlineAfter(limit: number | undefined): number {
  return limit === undefined ? Number.POSITIVE_INFINITY : Date.now() + limit;
}
