/** Client for Draftwood: typed, streaming, on @grpc/grpc-js. */

export { type CallOptions, Client } from "./client.js";
export type { ClientOptions, TlsConfig } from "./connection.js";
export {
  AbortedError,
  ArgumentError,
  ClientClosedError,
  DeadlineError,
  DraftwoodError,
  type ErrorDetails,
  FailedPreconditionError,
  type FieldViolation,
  InternalError,
  InvalidRequestError,
  NotFoundError,
  PermissionDeniedError,
  QuotaExceededError,
  RequestCancelledError,
  ResourceExhaustedError,
  type StatusCode,
  StatusError,
  UnauthenticatedError,
  UnavailableError,
  UnimplementedError,
} from "./errors.js";
export type { ChatMessage, GenerateOptions, Prompt, Tool, ToolCall } from "./request.js";
export type * from "./results.js";
export { NO_RETRY, type RetryPolicy } from "./retry.js";
export type { GenerationStream } from "./stream.js";
export { ToolCallReader } from "./tools.js";
