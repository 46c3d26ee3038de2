/** The errors of the client. */

/** An argument that cannot be encoded. Ranges are checked by the server. */
export class ArgumentError extends Error {
  /** Name of the argument, such as "messages[2]", or of the field inside it, such as "parameters". */
  readonly argument: string;

  constructor(argument: string, problem: string) {
    super(`${argument}: ${problem}`);
    this.name = "ArgumentError";
    this.argument = argument;
  }
}

/** One problem of a request. */
export interface FieldViolation {
  /** Path of the field, such as "sampling.temperature"; the subject of a quota or a precondition. */
  readonly field: string;
  readonly description: string;
}

/** The request ended with a status other than OK. `cause` is the `ConnectError`, or what cancelled the request. */
export class StatusError extends Error {
  /** The name of the gRPC status, such as "UNAVAILABLE". */
  readonly code: string = "UNKNOWN";
  /** For programs, such as "QUEUE_FULL"; empty if the error is not from the server. */
  readonly reason: string = "";
  /** Problems of the request. */
  readonly violations: readonly FieldViolation[] = [];
  /** Delay before a retry that the server sent, in milliseconds. */
  readonly retryAfterMs: number | undefined;
  /** Whether the same request may succeed later. */
  readonly retryable: boolean = false;
  /** As in the server's logs; empty if unknown. */
  readonly requestId: string = "";

  constructor(message: string, details: Partial<StatusError>, options?: ErrorOptions) {
    super(message, options);
    Object.assign(this, details, { name: new.target.name });
  }
}

/** INVALID_ARGUMENT, OUT_OF_RANGE: `violations` contains the fields and the problems. */
export class InvalidRequestError extends StatusError {}

/** The credential is missing or invalid. */
export class UnauthenticatedError extends StatusError {}

/** The caller is known, but lacks the permission. */
export class PermissionDeniedError extends StatusError {}

/** What the request names does not exist, such as its model. */
export class NotFoundError extends StatusError {}

/**
 * A rate limit of the tenant is reached; `violations` names it. Not retried by itself: the request fits `retryAfterMs`
 * later, and never if that is undefined.
 */
export class QuotaExceededError extends StatusError {}

/** No server could be reached, or its queue is full, after all retries. */
export class UnavailableError extends StatusError {}

/** The answer was not complete in time, or the server predicted that it would not be. */
export class DeadlineError extends StatusError {}

/** The request was cancelled: by `cancel()`, its signal, leaving its loop, closing the client, or by the server. */
export class RequestCancelledError extends StatusError {}

/** The server failed, or broke the protocol. */
export class InternalError extends StatusError {}
