/** A connection, and its calls: deadline, headers, retries, cancellation, typed errors. */

import { setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import type {
  DescMessage,
  DescMethodStreaming,
  DescMethodUnary,
  DescService,
  MessageInitShape,
  MessageShape,
} from "@bufbuild/protobuf";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, type Client as Methods, makeAnyClient, type Transport } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import * as errors from "./errors.js";
import * as rpc from "./gen/google/rpc/error_details_pb.js";
import { type CallOptions, type ClientOptions, requestHeaders, settingsOf, timeLimit } from "./options.js";

/** A silently broken connection is detected within 40 s while a request is under way. Servers accept a ping every 10 s. */
const PINGS = { pingIntervalMs: 30_000, pingTimeoutMs: 10_000 };
const MAX_MESSAGE_BYTES = 16 * 2 ** 20;

type Requests<Request> = Iterable<Request> | AsyncIterable<Request>;

/** The methods of a service of the protocol. Requests are plain objects; a stream of them is any (async) iterable. */
export type ServiceClient<S extends DescService> = {
  readonly [Name in keyof Methods<S>]: Methods<S>[Name] extends (request: infer R, options?: never) => infer Answer
    ? (request: R extends AsyncIterable<infer Message> ? R | Iterable<Message> : R, options?: CallOptions) => Answer
    : never;
};

export class Connection {
  readonly #settings: ReturnType<typeof settingsOf>;
  readonly #sessions: Http2SessionManager;
  readonly #transport: Transport;
  readonly #closed = new AbortController();

  /** @throws ArgumentError an argument is invalid. */
  constructor(target: string | undefined, options: ClientOptions) {
    this.#settings = settingsOf(target, options);
    const { tls } = this.#settings;
    const baseUrl = `${tls ? "https" : "http"}://${this.#settings.target}`;
    const sessionManager = new Http2SessionManager(baseUrl, PINGS, tls);
    this.#sessions = sessionManager;
    this.#transport = createGrpcTransport({ baseUrl, sessionManager, readMaxBytes: MAX_MESSAGE_BYTES });
    setMaxListeners(0, this.#closed.signal); // each call under way is one
  }

  /** The default time limit of calls. */
  get timeoutMs(): number {
    return this.#settings.timeoutMs;
  }

  /** Cancels calls under way and closes the connection. May be called twice. */
  close(): void {
    this.#closed.abort(new Error("the client is closed"));
    this.#sessions.abort();
  }

  service<S extends DescService>(service: S): ServiceClient<S> {
    return makeAnyClient(service, (method) => (given: object, options?: CallOptions) => {
      if (method.methodKind === "unary") return this.unary(method, given as never, options);
      return this.run(method, (method.methodKind === "bidi_streaming" ? given : [given]) as never, options);
    }) as ServiceClient<S>;
  }

  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions & { readonly requestId?: string } = {},
  ): Promise<MessageShape<O>> {
    const call = { ...options, timeoutMs: options.timeoutMs ?? this.timeoutMs };
    const stream = method as unknown as DescMethodStreaming<I, O>; // on the wire, it is one with one message each
    let answer: MessageShape<O> | undefined;
    for await (const response of this.run(stream, [request], call)) answer = response;
    const { requestId = "" } = options;
    if (!answer) throw new errors.InternalError("the server sent no answer", { code: "INTERNAL", requestId });
    return answer;
  }

  /**
   * The responses of a call, which has no deadline unless `timeoutMs` sets one. Aborting `scope` cancels it, and so does
   * leaving a `for await` loop. It is made again if it fails before its first response, up to `maxAttempts` times.
   *
   * @throws StatusError the call failed; or what `requests` threw, which ends the call.
   */
  async *run<I extends DescMessage, O extends DescMessage>(
    method: DescMethodStreaming<I, O>,
    requests: Requests<MessageInitShape<I>>,
    { timeoutMs, signal, metadata, requestId = "" }: CallOptions & { readonly requestId?: string } = {},
    scope = new AbortController(),
  ): AsyncGenerator<MessageShape<O>, undefined, undefined> {
    const limit = timeLimit(timeoutMs);
    const end = performance.now() + limit;
    const late = new ConnectError("the deadline has passed", Code.DeadlineExceeded);
    const timer = Number.isFinite(limit) ? setTimeout(() => scope.abort(late), limit) : undefined;
    for (const source of [signal, this.#closed.signal]) {
      source?.addEventListener("abort", () => scope.abort(source.reason), { signal: scope.signal });
      if (source?.aborted) scope.abort(source.reason);
    }
    const failure: { cause?: unknown } = {};
    try {
      for (let attempt = 1; ; attempt += 1) {
        const headers = await requestHeaders(this.#settings, metadata);
        if (timer) headers.set("grpc-timeout", `${Math.max(1, Math.ceil(end - performance.now()))}m`);
        let begun = false;
        try {
          scope.signal.throwIfAborted();
          const sent = watched(requests, failure);
          const { message } = await this.#transport.stream(method, scope.signal, undefined, headers, sent);
          for await (const response of message) {
            begun = true;
            yield response;
          }
          return;
        } catch (thrown) {
          const { aborted, reason } = scope.signal;
          if (aborted && reason !== late) throw cancelledError(requestId, reason);
          const error = ConnectError.from(aborted ? reason : thrown);
          if ("cause" in failure && error.cause === failure.cause) throw failure.cause;
          const status = statusError(error, this.#settings.target, limit, requestId);
          // CANCELLED, and not by this client: it arrived at the moment when a server that stops closes the connection.
          const failed = status.code === "UNAVAILABLE" || status.code === "CANCELLED";
          const again = !begun && failed && attempt < this.#settings.maxAttempts;
          const delay = pushbackMs(error) ?? status.retryAfterMs ?? backoffMs(attempt);
          if (!again || performance.now() + delay >= end) throw status;
          await sleep(delay, undefined, { signal: scope.signal }).catch(() => {}); // the next turn throws
        }
      }
    } finally {
      clearTimeout(timer);
      scope.abort();
    }
  }
}

/** The requests; what they throw is the `cause` of `failure`. */
async function* watched<Request>(requests: Requests<Request>, failure: { cause?: unknown }) {
  try {
    yield* requests;
  } catch (error) {
    failure.cause = error;
    throw error;
  }
}

/** The wait after an attempt, if the server does not say how long: 0.1 s, then twice as long each time. */
function backoffMs(attempt: number): number {
  return 100 * 2 ** (attempt - 1) * (0.8 + 0.4 * Math.random());
}

const BY_CODE: Partial<Record<string, typeof errors.StatusError>> = {
  INVALID_ARGUMENT: errors.InvalidRequestError,
  OUT_OF_RANGE: errors.InvalidRequestError,
  UNAUTHENTICATED: errors.UnauthenticatedError,
  PERMISSION_DENIED: errors.PermissionDeniedError,
  NOT_FOUND: errors.NotFoundError,
  UNAVAILABLE: errors.UnavailableError,
  DEADLINE_EXCEEDED: errors.DeadlineError,
  CANCELLED: errors.RequestCancelledError,
  INTERNAL: errors.InternalError,
  UNKNOWN: errors.InternalError,
  DATA_LOSS: errors.InternalError,
};

/** What to try, by Node's code of the error that broke the connection; other errors are clear without. */
const REMEDIES: Partial<Record<string, string>> = {
  ECONNREFUSED: "nothing listens there; check host and port, and that the server runs",
  ECONNRESET: "the connection was closed; if the server requires TLS or a client certificate, set tls",
  ERR_HTTP2_ERROR: "what listens there does not speak gRPC; check the port, and set tls if it requires TLS",
  ERR_SSL_WRONG_VERSION_NUMBER: "what listens there does not use TLS; leave out TLS, or check the port",
};

/** The request was cancelled for this reason. */
export function cancelledError(requestId: string, cause: unknown): errors.RequestCancelledError {
  return new errors.RequestCancelledError("the request was cancelled", { code: "CANCELLED", requestId }, { cause });
}

/** When the server wants a retry, if it says so; a negative or unreadable value forbids it: Infinity. */
function pushbackMs({ metadata }: ConnectError): number | undefined {
  const pushback = metadata.get("grpc-retry-pushback-ms");
  return pushback === null ? undefined : /^\d+$/.test(pushback) ? Number(pushback) : Number.POSITIVE_INFINITY;
}

/** The typed form of what a call threw. Messages that are not the server's own get its address. */
function statusError(error: ConnectError, target: string, limitMs: number, requestId: string): errors.StatusError {
  const [info] = error.findDetails(rpc.ErrorInfoSchema);
  const [retry] = error.findDetails(rpc.RetryInfoSchema);
  const fields = error.findDetails(rpc.BadRequestSchema).flatMap((detail) => detail.fieldViolations);
  const quotas = error.findDetails(rpc.QuotaFailureSchema).flatMap((detail) => detail.violations);
  const preconditions = error.findDetails(rpc.PreconditionFailureSchema).flatMap((detail) => detail.violations);
  const lost = error.code === Code.Canceled && error.rawMessage.startsWith("http/2") ? "ECONNRESET" : undefined;
  const broken = error.cause instanceof Error && "code" in error.cause ? String(error.cause.code) : lost;
  const name = (Code[error.code] ?? "").replaceAll(/(?<=[a-z])[A-Z]/g, "_$&").toUpperCase();
  const code = broken ? "UNAVAILABLE" : name === "CANCELED" ? "CANCELLED" : name;
  const [pushback, retryInfoMs] = [pushbackMs(error), retry?.retryDelay && durationMs(retry.retryDelay)];
  const details: Partial<errors.StatusError> = {
    code,
    reason: info?.reason ?? "",
    violations: [
      ...fields.map(({ field, description }) => ({ field, description })),
      ...[...quotas, ...preconditions].map(({ subject, description }) => ({ field: subject, description })),
    ],
    retryAfterMs: Number.isFinite(pushback) ? pushback : retryInfoMs,
    retryable:
      (code === "UNAVAILABLE" && pushback !== Number.POSITIVE_INFINITY) ||
      (retryInfoMs !== undefined && (code === "UNAVAILABLE" || quotas.length > 0)),
    requestId: info?.metadata.request_id || requestId,
  };
  let message = error.rawMessage || code;
  if (broken) {
    message = `cannot reach ${target}: ${REMEDIES[broken] ? `${REMEDIES[broken]} (${message.trim()})` : message}`;
  } else if (!info) {
    const late = code === "DEADLINE_EXCEEDED" && Number.isFinite(limitMs);
    message = `${target}: ${late ? `no complete answer within ${limitMs / 1000} s` : message}`;
  }
  const type = quotas.length > 0 ? errors.QuotaExceededError : (BY_CODE[code] ?? errors.StatusError);
  return new type(message, details, { cause: error });
}
