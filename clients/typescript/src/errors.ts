/**
 * The errors of the client.
 *
 *     DraftwoodError
 *     ├── ArgumentError                  an argument is invalid; nothing was sent
 *     ├── ClientClosedError              the client was closed before the request was made
 *     └── StatusError                    the request ended with a status other than OK
 *         ├── InvalidRequestError        INVALID_ARGUMENT, OUT_OF_RANGE: see `violations`
 *         ├── UnauthenticatedError       UNAUTHENTICATED
 *         ├── PermissionDeniedError      PERMISSION_DENIED
 *         ├── NotFoundError              NOT_FOUND
 *         ├── AbortedError               ABORTED: the client read too slowly
 *         ├── FailedPreconditionError    FAILED_PRECONDITION
 *         ├── ResourceExhaustedError     RESOURCE_EXHAUSTED: a message that is too large
 *         │   └── QuotaExceededError     a rate limit of the tenant is reached: see `retryAfterMs`
 *         ├── UnavailableError           UNAVAILABLE: no server reached, or its queue is full; see `retryAfterMs`
 *         ├── DeadlineError              DEADLINE_EXCEEDED
 *         ├── RequestCancelledError      CANCELLED
 *         ├── UnimplementedError         UNIMPLEMENTED: the server is older than the client, or not a Draftwood server
 *         └── InternalError              INTERNAL, UNKNOWN, DATA_LOSS and any other
 */

import type { status } from "@grpc/grpc-js";

/** The name of a gRPC status, such as "UNAVAILABLE". */
export type StatusCode = keyof typeof status;

/** Base class of all errors of this client. */
export class DraftwoodError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** An argument that cannot be encoded. Ranges are checked by the server. */
export class ArgumentError extends DraftwoodError {
  /** Name of the argument, with the path inside it where there is one, such as "prompt[2].role". */
  readonly argument: string;

  constructor(argument: string, problem: string) {
    super(`${argument}: ${problem}`);
    this.argument = argument;
  }
}

/** The client was closed; create a new one. */
export class ClientClosedError extends DraftwoodError {}

/** One problem of a request. */
export interface FieldViolation {
  /**
   * Path of the field in the request, such as "sampling.temperature"; for a quota, its subject; for a precondition, the
   * resource that does not meet it.
   */
  readonly field: string;
  /** The problem, in words. */
  readonly description: string;
}

/** A failed request; each field is a property of `StatusError` too. */
export interface ErrorDetails {
  /** The gRPC status. */
  readonly code: StatusCode;
  /** For programs, such as "QUEUE_FULL"; empty if the error is not from the server. */
  readonly reason: string;
  /** Details of the reason, by name. */
  readonly metadata: Readonly<Record<string, string>>;
  /** Problems of the request. */
  readonly violations: readonly FieldViolation[];
  /** Delay before a retry that the server sent, in milliseconds. */
  readonly retryAfterMs: number | undefined;
  /** Whether the same request may succeed later. */
  readonly retryable: boolean;
  /** Whether `violations` are limits that are reached. */
  readonly overQuota: boolean;
  /** As in the server's logs; empty if unknown. */
  readonly requestId: string;
  /** The resource that the error is about, such as "tenants/acme"; empty if it is about none. */
  readonly resource: string;
}

/** The request ended with a status other than OK. `cause` is gRPC's own error, if there is one. */
export class StatusError extends DraftwoodError implements ErrorDetails {
  readonly code: StatusCode;
  readonly reason: string;
  readonly metadata: Readonly<Record<string, string>>;
  readonly violations: readonly FieldViolation[];
  readonly retryAfterMs: number | undefined;
  readonly retryable: boolean;
  readonly overQuota: boolean;
  readonly requestId: string;
  readonly resource: string;

  constructor(message: string, details: ErrorDetails, options?: ErrorOptions) {
    super(message, options);
    this.code = details.code;
    this.reason = details.reason;
    this.metadata = details.metadata;
    this.violations = details.violations;
    this.retryAfterMs = details.retryAfterMs;
    this.retryable = details.retryable;
    this.overQuota = details.overQuota;
    this.requestId = details.requestId;
    this.resource = details.resource;
  }
}

/** The request is invalid; `violations` contains the fields and the problems. */
export class InvalidRequestError extends StatusError {}

/** The credential is missing or invalid. */
export class UnauthenticatedError extends StatusError {}

/** The caller is known, but lacks the permission. */
export class PermissionDeniedError extends StatusError {}

/** What the request names does not exist, such as its model. */
export class NotFoundError extends StatusError {}

/** The server aborted the request: this client read too slowly. */
export class AbortedError extends StatusError {}

/** The server is not in the state that the request needs. */
export class FailedPreconditionError extends StatusError {}

/** A quota is exhausted, or a message is too large. */
export class ResourceExhaustedError extends StatusError {}

/**
 * A rate limit of the tenant is reached; `violations` names it. Not retried by itself.
 *
 * The same request fits `retryAfterMs` later if no other is admitted until then; undefined if it never fits.
 */
export class QuotaExceededError extends ResourceExhaustedError {}

/** No server could be reached, or its queue is full, after all retries. */
export class UnavailableError extends StatusError {}

/** The answer was not complete in time, or the server predicted that it would not be. */
export class DeadlineError extends StatusError {}

/** The request was cancelled: by `cancel()`, by its signal, by leaving its loop, or by the server. */
export class RequestCancelledError extends StatusError {}

/** The server does not have this method. */
export class UnimplementedError extends StatusError {}

/** The server failed, or broke the protocol. */
export class InternalError extends StatusError {}

const BY_CODE: Partial<Record<StatusCode, typeof StatusError>> = {
  INVALID_ARGUMENT: InvalidRequestError,
  OUT_OF_RANGE: InvalidRequestError,
  UNAUTHENTICATED: UnauthenticatedError,
  PERMISSION_DENIED: PermissionDeniedError,
  NOT_FOUND: NotFoundError,
  ABORTED: AbortedError,
  FAILED_PRECONDITION: FailedPreconditionError,
  RESOURCE_EXHAUSTED: ResourceExhaustedError,
  UNAVAILABLE: UnavailableError,
  DEADLINE_EXCEEDED: DeadlineError,
  CANCELLED: RequestCancelledError,
  UNIMPLEMENTED: UnimplementedError,
};

/** The error of the type that belongs to `details.code`. */
export function errorFor(
  message: string,
  details: Partial<ErrorDetails> & { code: StatusCode },
  options?: ErrorOptions,
): StatusError {
  const known = {
    reason: "",
    metadata: {},
    violations: [],
    retryAfterMs: undefined,
    retryable: false,
    overQuota: false,
    requestId: "",
    resource: "",
    ...details,
  };
  const found = BY_CODE[details.code] ?? InternalError;
  const type = found === ResourceExhaustedError && known.overQuota ? QuotaExceededError : found;
  return new type(message, known, options);
}
