/** Converts gRPC's errors to this client's. Decodes the google.rpc details of the server. */

import { type DescMessage, fromBinary, type MessageShape } from "@bufbuild/protobuf";
import { type Any, anyUnpack, durationMs } from "@bufbuild/protobuf/wkt";
import { type MetadataValue, type ServiceError, status } from "@grpc/grpc-js";
import { type ErrorDetails, errorFor, type StatusCode, type StatusError } from "./errors.js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  PreconditionFailureSchema,
  QuotaFailureSchema,
  RequestInfoSchema,
  ResourceInfoSchema,
  RetryInfoSchema,
} from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";
import { unreachable } from "./unreachable.js";

const DETAILS_KEY = "grpc-status-details-bin";
const PUSHBACK_KEY = "grpc-retry-pushback-ms";
/** Of the server, in the words of gRPC's C core, or of this client. */
const TOO_LARGE = /^(SERVER: )?Received message larger than max \((\d+) vs\.? (\d+)\)$/;
const RAISE = 'raise it by channelOptions: { "grpc.max_receive_message_length": ... }';

/** The address of a server, and whether the client uses TLS. */
interface Reached {
  readonly target: string;
  readonly usesTls: boolean;
}

/**
 * The typed form of `error`, with `error` as its cause.
 *
 * @param error as gRPC reports it.
 * @param reached the server; added to messages of gRPC itself, which lack it.
 * @param timeoutMs deadline set by the caller.
 * @param requestId used if the server's details contain none.
 */
export function statusError(
  error: ServiceError,
  { target, usesTls }: Reached,
  timeoutMs: number | undefined,
  requestId: string,
): StatusError {
  const details = decoded(error);
  const message = details.reason
    ? error.details
    : messageOfGrpc(details.code, error.details, target, usesTls, timeoutMs);
  return errorFor(message, { ...details, requestId: details.requestId || requestId }, { cause: error });
}

/** The response violates the protocol. */
export function protocolError(message: string, requestId: string): StatusError {
  return errorFor(message, { code: "INTERNAL", requestId });
}

/** The client cancelled the request; `cause` is the reason of its signal, if it has one. */
export function cancelledError(requestId: string, cause?: unknown): StatusError {
  return errorFor("the request was cancelled", { code: "CANCELLED", requestId }, { cause });
}

/** The server was not reachable or not ready within `timeoutMs`; `last` is the error of the last attempt. */
export function notReadyError(target: string, timeoutMs: number, last: StatusError): StatusError {
  const message = `${target} was not ready within ${timeoutMs / 1000} s: ${last.message}`;
  return errorFor(message, { code: "DEADLINE_EXCEEDED" }, { cause: last });
}

function messageOfGrpc(
  code: StatusCode,
  text: string,
  target: string,
  usesTls: boolean,
  timeoutMs: number | undefined,
): string {
  if (code === "DEADLINE_EXCEEDED" && timeoutMs !== undefined) {
    return `${target}: no complete answer within ${timeoutMs / 1000} s`;
  }
  if (code === "CANCELLED" && text === "Cancelled on client") {
    return "the request was cancelled";
  }
  if (code === "UNAVAILABLE" && text.endsWith(" is unhealthy")) {
    return `no server of ${target} is ready`;
  }
  if (code === "UNAVAILABLE") {
    return unreachable(target, usesTls, text);
  }
  if (text === "Method not found!") {
    return `${target} is no Draftwood server, or an older one that lacks this method (gRPC: ${text})`;
  }
  const [, server, size, limit] = TOO_LARGE.exec(text) ?? [];
  if (size !== undefined) {
    return server
      ? `${target}: the request has ${size} bytes, and the server takes at most ${limit}`
      : `${target}: the answer has ${size} bytes, and this client takes at most ${limit}; ${RAISE}`;
  }
  return `${target}: ${text || code}`;
}

function decoded(error: ServiceError): ErrorDetails {
  const code = (status[error.code] ?? "UNKNOWN") as StatusCode;
  const find = finder(error.metadata?.get(DETAILS_KEY)[0]);
  const info = find(ErrorInfoSchema);
  const delay = find(RetryInfoSchema)?.retryDelay;
  const quotas = find(QuotaFailureSchema)?.violations ?? [];
  const preconditions = find(PreconditionFailureSchema)?.violations ?? [];
  const [pushbackMs, mayRetry] = pushback(error.metadata?.get(PUSHBACK_KEY)[0]);
  const retryInfoMs = delay && durationMs(delay);
  return {
    code,
    reason: info?.reason ?? "",
    metadata: { ...info?.metadata },
    violations: [
      ...(find(BadRequestSchema)?.fieldViolations ?? []).map(({ field, description }) => ({ field, description })),
      ...[...quotas, ...preconditions].map(({ subject, description }) => ({ field: subject, description })),
    ],
    retryAfterMs: pushbackMs ?? retryInfoMs,
    retryable:
      (code === "UNAVAILABLE" && (mayRetry || retryInfoMs !== undefined)) ||
      (quotas.length > 0 && retryInfoMs !== undefined),
    overQuota: quotas.length > 0,
    requestId: find(RequestInfoSchema)?.requestId || (info?.metadata.request_id ?? ""),
    resource: find(ResourceInfoSchema)?.resourceName ?? "",
  };
}

/** Finds the detail of a type. Details that cannot be decoded are ignored. */
function finder(encoded: MetadataValue | undefined): <T extends DescMessage>(type: T) => MessageShape<T> | undefined {
  const details = decodedOr<Any[]>([], () =>
    encoded instanceof Uint8Array ? fromBinary(StatusSchema, encoded).details : [],
  );
  return (type) =>
    decodedOr(undefined, () => details.map((detail) => anyUnpack(detail, type)).find((found) => found !== undefined));
}

function decodedOr<T>(fallback: T, decode: () => T): T {
  try {
    return decode();
  } catch {
    return fallback;
  }
}

/** Milliseconds to wait before a retry, and whether to retry at all: a negative or unreadable value forbids it. */
function pushback(value: MetadataValue | undefined): [number | undefined, boolean] {
  if (value === undefined) {
    return [undefined, true];
  }
  const milliseconds = /^\d+$/.test(String(value)) ? Number(value) : -1;
  return milliseconds >= 0 ? [milliseconds, true] : [undefined, false];
}
